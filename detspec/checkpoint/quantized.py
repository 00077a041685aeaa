"""Quantized matrices: the tensors that one is stored as, by format, and how they become its numbers.

`dequantize` of a format takes the stored tensors by the ends of their names, all turned to `[out, in]`, and gives the matrix in
float32. It works on any block that consists of whole words and groups, so shards and small pieces have the bits of the whole.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from detspec.checkpoint.blocks import Block, block_shape, whole_block
from detspec.checkpoint.files import FILE_DTYPES, Header

Tensors = dict[str, np.ndarray]
Shape = tuple[int, int]
# Outputs and inputs that share a scale; None for all of them. A scale for each output is `(1, None)`.
Group = tuple[int | None, int | None]

FLOATS = ("F32", "BF16", "F16")
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # e2m1
MX_GROUP = 32
# AWQ packs eight outputs into a word; output i has the bits from 4 * AWQ_ORDER[i] on.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
PIECE_NUMBERS = 1 << 18  # numbers of a matrix that are dequantized at a time, unless a group has more


class StoredPart(NamedTuple):
    """A tensor of those that a matrix `[out, in]` is stored as."""

    dtypes: tuple[str, ...]  # dtypes of safetensors that it may have
    holds: Group = (1, 1)  # outputs and inputs that one of its numbers stands for
    turned: bool = False  # whether it is stored as [in, out]

    def units(self, shape: Shape) -> Shape:
        """Outputs and inputs that one number stands for, in a matrix of this shape."""
        outs, ins = self.holds
        return shape[0] if outs is None else outs, shape[1] if ins is None else ins

    def stored_shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape of the tensor for a matrix of this shape."""
        stored = block_shape(self.stored_block(shape, whole_block(shape)))
        return stored[::-1] if self.turned else stored

    def stored_block(self, shape: Shape, block: Block) -> Block:
        """The part of the tensor for a block of whole words and groups, `[out, in]` whichever way it is stored."""
        units = self.units(shape)
        return tuple((start // unit, math.ceil(stop / unit)) for (start, stop), unit in zip(block, units, strict=True))


class Format(NamedTuple):
    """How each quantized matrix of a checkpoint is stored.

    Attributes:
        name: the format's name in messages.
        parts: end of a tensor's name -> what it holds; a matrix is quantized if it has the first one.
        dequantize: from tensors and the shape of the matrix, or of a block, to its numbers in float32.
        constants: tensors that say nothing new: end of the name -> what it must hold for a matrix of this shape.
        unused: ends of names of tensors about activations, which are not quantized here.
        others: variants that a matrix may have instead, as its tensors show.
    """

    name: str
    parts: dict[str, StoredPart]
    dequantize: Callable[[Tensors, Shape], np.ndarray]
    constants: dict[str, Callable[[Shape], np.ndarray]]
    unused: tuple[str, ...]
    others: "tuple[Format, ...]" = ()


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix that is stored as several tensors; stands among headers where that of a plain matrix would stand."""

    file: str  # file of the first tensor
    begin: int  # byte where the first tensor starts
    format: Format
    shape: Shape
    parts: dict[str, Header]  # by the ends of their names; axes of length 1 as the format has them
    constants: dict[str, Header]  # constants that are there, unchecked

    def dequantized(self, block: Block, read_fn: Callable[[Header, Block], np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields pieces of a block: which of its rows they are, and their numbers in float32.

        `read_fn` reads a block of a tensor as it is stored. All of them are read before the first piece comes, for the smallest
        block around `block` that consists of whole words and groups.
        """
        outs, ins, step = self._widened(block)
        stored = {}
        for suffix, part in self.format.parts.items():
            cut = part.stored_block(self.shape, (outs, ins))
            tensor = read_fn(self.parts[suffix], cut[::-1] if part.turned else cut)
            stored[suffix] = np.ascontiguousarray(tensor.T) if part.turned else tensor
        (top, bottom), (left, right) = block
        rows = max(1, PIECE_NUMBERS // (ins[1] - ins[0]) // step) * step
        for start in range(*outs, rows):
            stop = min(start + rows, outs[1])
            piece = ((start - outs[0], stop - outs[0]), ins)
            tensors = {
                suffix: stored[suffix][slice(*part.stored_block(self.shape, piece)[0])]
                for suffix, part in self.format.parts.items()
            }
            with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for NaN and infinity
                numbers = self.format.dequantize(tensors, (stop - start, ins[1] - ins[0]))
            kept = slice(max(start, top), min(stop, bottom))
            yield (
                slice(kept.start - top, kept.stop - top),
                numbers[kept.start - start : kept.stop - start, left - ins[0] : right - ins[0]],
            )

    def _widened(self, block: Block) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Outputs and inputs of the block of whole words and groups around `block`; and how many outputs belong together.

        An axis with one word or group is not cut for it.
        """
        units = [part.units(self.shape) for part in self.format.parts.values()]
        steps = [math.lcm(*(unit[axis] for unit in units if unit[axis] < size)) for axis, size in enumerate(self.shape)]
        outs, ins = (
            (start // step * step, min(size, math.ceil(stop / step) * step))
            for (start, stop), step, size in zip(block, steps, self.shape, strict=True)
        )
        return outs, ins, steps[0]


def gather_quantized(
    format: Format, shapes: dict[str, tuple[int, ...]], tensors: dict[str, Header], problems: list[str]
) -> dict[str, Header | Quantized]:
    """`tensors` with one entry for each quantized matrix instead of the tensors that it is stored as.

    `shapes` are those that the config asks for. A tensor that is missing, or has another shape or dtype than the format and
    the shape of its matrix ask for, is a problem.
    """
    rest = dict(tensors)
    matrices = {}
    main, first = next(iter(format.parts.items()))
    for name, shape in shapes.items():
        layer = name.removesuffix("weight")
        header = tensors.get(layer + main)
        if layer == name or len(shape) != 2 or header is None:
            continue
        if header.dtype in FILE_DTYPES and header.dtype not in first.dtypes:  # the format leaves this matrix out
            continue
        outs, ins = shape
        variant = _variant(format, layer, (outs, ins), tensors)
        parts = {}
        for suffix, part in variant.parts.items():
            found = rest.pop(layer + suffix, None)
            wanted = part.stored_shape((outs, ins))
            if found is None:
                problems.append(f"tensor {layer}{suffix} {list(wanted)} of the format {variant.name} is missing")
            elif problem := _misfit(found, wanted, part.dtypes):
                problems.append(f"tensor {layer}{suffix} {problem}")
            else:
                parts[suffix] = dataclasses.replace(found, shape=wanted)
        constants = {suffix: rest.pop(layer + suffix) for suffix in variant.constants if layer + suffix in rest}
        for suffix in variant.unused:
            rest.pop(layer + suffix, None)
        matrices[name] = Quantized(header.file, header.begin, variant, (outs, ins), parts, constants)
    return {**rest, **matrices}


def _variant(format: Format, layer: str, shape: Shape, tensors: dict[str, Header]) -> Format:
    """The variant of `format` whose tensors the layer has, and best in shapes that fit; `format` if it has those of none."""
    there = [one for one in (format, *format.others) if all(layer + suffix in tensors for suffix in one.parts)]

    def fits(one: Format) -> bool:
        return not any(_misfit(tensors[layer + end], part.stored_shape(shape), part.dtypes) for end, part in one.parts.items())

    return max(there, key=fits, default=format)  # the first one that fits, else the first


def _misfit(header: Header, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """Says what is wrong with a header, or ""; axes of length 1 may be left out or added, as writers differ in them."""
    if [size for size in header.shape if size != 1] != [size for size in shape if size != 1]:
        return f"has shape {list(header.shape)}, the format and the config ask for {list(shape)}"
    if header.dtype not in dtypes:
        return f"has the dtype {header.dtype}, the format has {' or '.join(dtypes)}"
    return ""


def fp8(block: Group, scale: str = "weight_scale_inv") -> Format:
    """Float8 numbers times a float32 scale for each block, as in DeepSeek's and Qwen's folders; rounded once, at the end.

    AutoFP8 calls the scale `weight_scale`; that is the same number.
    """

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        return tensors["weight"].astype(np.float32) * _spread(tensors[scale].astype(np.float32), block, shape)

    parts = {"weight": StoredPart(("F8_E4M3",)), scale: StoredPart((*FLOATS, "F8_E8M0"), block)}
    return Format("fp8", parts, dequantize, {}, ("activation_scale", "input_scale"))


def whole_numbers(dtype: str, group: Group, symmetric: bool) -> Format:
    """Compressed-tensors, int-quantized (I8) and float-quantized (F8_E4M3): a byte a number."""

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = None if symmetric else tensors["weight_zero_point"]
        return _scaled(tensors["weight"], zeros, tensors["weight_scale"], group, shape)

    parts = {"weight": StoredPart((dtype,)), "weight_scale": StoredPart(FLOATS, group)}
    if not symmetric:
        parts["weight_zero_point"] = StoredPart(("I8",), group)
    return Format("compressed-tensors", parts, dequantize, {}, ("input_scale", "input_zero_point"))


def packed(bits: int, group: Group, symmetric: bool) -> Format:
    """Compressed-tensors, pack-quantized: inputs in words of 32 bits, zero points too but along outputs; all plus half."""
    per_word = 32 // bits
    half = 1 << (bits - 1)

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = None if symmetric else _unpack(tensors["weight_zero_point"], bits, axis=0) - half
        return _scaled(_unpack(tensors["weight_packed"], bits, axis=1) - half, zeros, tensors["weight_scale"], group, shape)

    parts = {"weight_packed": StoredPart(("I32",), (1, per_word)), "weight_scale": StoredPart(FLOATS, group)}
    if not symmetric:
        parts["weight_zero_point"] = StoredPart(("I32",), (per_word, group[1]))
    constants = {"weight_shape": lambda shape: np.array(shape)}
    return Format("compressed-tensors", parts, dequantize, constants, ("input_scale", "input_zero_point"))


def mxfp4() -> Format:
    """Compressed-tensors, mxfp4-pack-quantized: two e2m1 numbers a byte, the first in its low bits; 2^(scale - 127) for 32."""

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        numbers = FP4_VALUES[_unpack(tensors["weight_packed"], 4, axis=1)[: shape[0], : shape[1]]]
        scales = np.ldexp(np.float32(1), tensors["weight_scale"].view(np.uint8).astype(np.int32) - 127)
        return numbers * _spread(scales, (1, MX_GROUP), shape)

    parts = {"weight_packed": StoredPart(("U8",), (1, 2)), "weight_scale": StoredPart(("U8", "F8_E8M0"), (1, MX_GROUP))}
    return Format("compressed-tensors", parts, dequantize, {}, ("input_global_scale",))


def awq(group_size: int | None) -> Format:
    """AWQ's gemm layout: eight outputs in a word in an order of its own, zero points likewise."""
    group = (1, group_size)

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = _unpack(tensors["qzeros"], 4, axis=0, order=AWQ_ORDER)
        return _scaled(_unpack(tensors["qweight"], 4, axis=0, order=AWQ_ORDER), zeros, tensors["scales"], group, shape)

    parts = {
        "qweight": StoredPart(("I32",), (8, 1), turned=True),
        "qzeros": StoredPart(("I32",), (8, group_size), turned=True),
        "scales": StoredPart(FLOATS, group, turned=True),
    }
    return Format("awq", parts, dequantize, {}, ())


def gptq(bits: int, group_size: int | None, is_v2: bool) -> Format:
    """GPTQ: inputs in words of 32 bits, zero points along outputs.

    Version 1 stores zero points less one, subtracted from whole words: a zero borrows from its neighbour. Adding one to each
    field of the whole word undoes both.
    """
    group = (1, group_size)
    per_word = 32 // bits
    one_each = np.uint32(0 if is_v2 else sum(1 << shift for shift in range(0, 32, bits)))

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = _unpack(tensors["qzeros"].view(np.uint32) + one_each, bits, axis=0)
        return _scaled(_unpack(tensors["qweight"], bits, axis=1), zeros, tensors["scales"], group, shape)

    parts = {
        "qweight": StoredPart(("I32",), (1, per_word), turned=True),
        "qzeros": StoredPart(("I32",), (per_word, group_size), turned=True),
        "scales": StoredPart(FLOATS, group, turned=True),
    }
    constants = {"g_idx": lambda shape: np.arange(shape[1]) // (group_size or shape[1])}
    return Format("gptq", parts, dequantize, constants, ())


def _scaled(numbers: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: Group, shape: Shape) -> np.ndarray:
    """`(numbers - zeros) * scales`, rounded to the dtype of the scales, which is what the formats' libraries compute in.

    The product of a number of 9 bits and a scale of 11 is exact in float32, so it is rounded once.
    """
    exact = numbers[: shape[0], : shape[1]].astype(np.float32)
    if zeros is not None:
        exact -= _spread(zeros.astype(np.float32), group, shape)
    exact *= _spread(scales.astype(np.float32), group, shape)
    return exact.astype(scales.dtype, copy=False).astype(np.float32, copy=False)


def _spread(values: np.ndarray, group: Group, shape: Shape) -> np.ndarray:
    """Values of groups as values of numbers; where one value is for a whole axis, that axis is left for broadcasting.

    `[[1, 2]]` of groups `(None, 2)` becomes `[[1, 1, 2]]` for a shape `(5, 3)`.
    """
    for axis, unit in enumerate(group):
        if unit is not None and values.shape[axis] > 1:
            values = np.repeat(values, unit, axis=axis)
    return values[: shape[0], : shape[1]]


def _unpack(words: np.ndarray, bits: int, *, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """The unsigned numbers of `bits` bits in each word, side by side along `axis`, as int32; lowest bits first without order.

    `[[0x21, 0x43]]` in bytes of two numbers becomes `[[1, 2, 3, 4]]` along axis 1 and `[[1, 3], [2, 4]]` along axis 0.
    """
    width = 8 * words.itemsize
    fields_in_order = np.arange(width // bits) if order is None else np.array(order)
    unsigned = words.view(f"u{words.itemsize}")
    shifts = (bits * fields_in_order).astype(unsigned.dtype)
    fields = unsigned[:, None, :] >> shifts[:, None] if axis == 0 else unsigned[:, :, None] >> shifts
    numbers = (fields & unsigned.dtype.type((1 << bits) - 1)).astype(np.int32)
    return numbers.reshape(-1, words.shape[1]) if axis == 0 else numbers.reshape(words.shape[0], -1)
