"""Formats of quantized matrices: the tensors that one is stored as, and how they become its numbers.

`dequantize` takes the stored tensors by the ends of their names, all turned to `[out, in]`, and gives the matrix in float32. It
works on any block that consists of whole words and groups, so shards and small pieces have the bits of the whole.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Tensors = dict[str, np.ndarray]
Shape = tuple[int, int]
# Outputs and inputs that share a scale; None for all of them. A scale for each output is `(1, None)`.
Group = tuple[int | None, int | None]

FLOATS = ("F32", "BF16", "F16")
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # e2m1
MX_GROUP = 32
# AWQ packs eight outputs into a word; output i has the bits from 4 * AWQ_ORDER[i] on.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Part(NamedTuple):
    """One of the tensors that a matrix `[out, in]` is stored as."""

    dtypes: tuple[str, ...]  # those of safetensors that it may have
    holds: Group = (1, 1)  # outputs and inputs that one of its numbers stands for
    turned: bool = False  # whether it is stored as [in, out]

    def units(self, shape: Shape) -> Shape:
        """Outputs and inputs that one number stands for, in a matrix of this shape."""
        outs, ins = self.holds
        return shape[0] if outs is None else outs, shape[1] if ins is None else ins

    def stored_shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape of the tensor for a matrix of this shape."""
        outs, ins = (math.ceil(size / unit) for size, unit in zip(shape, self.units(shape), strict=True))
        return (ins, outs) if self.turned else (outs, ins)


class Format(NamedTuple):
    """How each quantized matrix of a checkpoint is stored.

    Attributes:
        name: what messages call it.
        parts: end of a tensor's name -> what it holds; a matrix is quantized if it has the first one.
        dequantize: from tensors and the shape of the matrix, or of a block, to its numbers in float32.
        constants: tensors that say nothing new: end of the name -> what it must hold for a matrix of this shape.
        unused: ends of names of tensors about activations, which are not quantized here.
        others: variants that a matrix may have instead, as its tensors show.
    """

    name: str
    parts: dict[str, Part]
    dequantize: Callable[[Tensors, Shape], np.ndarray]
    constants: dict[str, Callable[[Shape], np.ndarray]]
    unused: tuple[str, ...]
    others: "tuple[Format, ...]" = ()


def fp8(block: Group, scale: str = "weight_scale_inv") -> Format:
    """Float8 numbers times a float32 scale for each block, as in DeepSeek's and Qwen's folders; rounded once, at the end.

    AutoFP8 calls the scale `weight_scale`; that is the same number.
    """

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        return tensors["weight"].astype(np.float32) * _spread(tensors[scale].astype(np.float32), block, shape)

    parts = {"weight": Part(("F8_E4M3",)), scale: Part((*FLOATS, "F8_E8M0"), block)}
    return Format("fp8", parts, dequantize, {}, ("activation_scale", "input_scale"))


def whole_numbers(dtype: str, group: Group, symmetric: bool) -> Format:
    """Compressed-tensors, int-quantized (I8) and float-quantized (F8_E4M3): a byte a number."""

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = None if symmetric else tensors["weight_zero_point"]
        return _scaled(tensors["weight"], zeros, tensors["weight_scale"], group, shape)

    parts = {"weight": Part((dtype,)), "weight_scale": Part(FLOATS, group)}
    if not symmetric:
        parts["weight_zero_point"] = Part(("I8",), group)
    return Format("compressed-tensors", parts, dequantize, {}, ("input_scale", "input_zero_point"))


def packed(bits: int, group: Group, symmetric: bool) -> Format:
    """Compressed-tensors, pack-quantized: inputs in words of 32 bits, zero points too but along outputs; all plus half."""
    per_word = 32 // bits
    half = 1 << (bits - 1)

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = None if symmetric else _unpack(tensors["weight_zero_point"], bits, axis=0) - half
        return _scaled(_unpack(tensors["weight_packed"], bits, axis=1) - half, zeros, tensors["weight_scale"], group, shape)

    parts = {"weight_packed": Part(("I32",), (1, per_word)), "weight_scale": Part(FLOATS, group)}
    if not symmetric:
        parts["weight_zero_point"] = Part(("I32",), (per_word, group[1]))
    constants = {"weight_shape": lambda shape: np.array(shape)}
    return Format("compressed-tensors", parts, dequantize, constants, ("input_scale", "input_zero_point"))


def mxfp4() -> Format:
    """Compressed-tensors, mxfp4-pack-quantized: two e2m1 numbers a byte, the first in its low bits; 2^(scale - 127) for 32."""

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        numbers = FP4_VALUES[_unpack(tensors["weight_packed"], 4, axis=1)[: shape[0], : shape[1]]]
        scales = np.ldexp(np.float32(1), tensors["weight_scale"].view(np.uint8).astype(np.int32) - 127)
        return numbers * _spread(scales, (1, MX_GROUP), shape)

    parts = {"weight_packed": Part(("U8",), (1, 2)), "weight_scale": Part(("U8", "F8_E8M0"), (1, MX_GROUP))}
    return Format("compressed-tensors", parts, dequantize, {}, ("input_global_scale",))


def awq(group_size: int | None) -> Format:
    """AWQ's gemm layout: eight outputs in a word in an order of its own, zero points likewise."""
    group = (1, group_size)

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = _unpack(tensors["qzeros"], 4, axis=0, order=AWQ_ORDER)
        return _scaled(_unpack(tensors["qweight"], 4, axis=0, order=AWQ_ORDER), zeros, tensors["scales"], group, shape)

    parts = {
        "qweight": Part(("I32",), (8, 1), turned=True),
        "qzeros": Part(("I32",), (8, group_size), turned=True),
        "scales": Part(FLOATS, group, turned=True),
    }
    return Format("awq", parts, dequantize, {}, ())


def gptq(bits: int, group_size: int | None, is_v2: bool) -> Format:
    """GPTQ: inputs in words of 32 bits, zero points along outputs.

    Version 1 stores zero points less one, subtracted from whole words: a zero borrows from its neighbour. Adding one to each
    place of the whole word undoes both.
    """
    group = (1, group_size)
    per_word = 32 // bits
    one_each = np.uint32(0 if is_v2 else sum(1 << shift for shift in range(0, 32, bits)))

    def dequantize(tensors: Tensors, shape: Shape) -> np.ndarray:
        zeros = _unpack(tensors["qzeros"].view(np.uint32) + one_each, bits, axis=0)
        return _scaled(_unpack(tensors["qweight"], bits, axis=1), zeros, tensors["scales"], group, shape)

    parts = {
        "qweight": Part(("I32",), (1, per_word), turned=True),
        "qzeros": Part(("I32",), (per_word, group_size), turned=True),
        "scales": Part(FLOATS, group, turned=True),
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
    places = np.arange(width // bits) if order is None else np.array(order)
    unsigned = words.view(f"u{words.itemsize}")
    shifts = (bits * places).astype(unsigned.dtype)
    fields = unsigned[:, None, :] >> shifts[:, None] if axis == 0 else unsigned[:, :, None] >> shifts
    numbers = (fields & unsigned.dtype.type((1 << bits) - 1)).astype(np.int32)
    return numbers.reshape(-1, words.shape[1]) if axis == 0 else numbers.reshape(words.shape[0], -1)
