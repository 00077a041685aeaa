"""Quantized matrices: the tensors that one is stored as, by format, and how they become its numbers.

`dequantize` of a format takes the stored tensors by the ends of their names, all turned to `[out, in]`, and gives the matrix in
float32. It works on any block that consists of whole words and groups, so shards and small pieces have the bits of the whole.
"""

import dataclasses
import itertools
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

PIECE_NUMBERS = 1 << 18  # numbers of a matrix that are dequantized at a time, unless a group has more


class StoredPart(NamedTuple):
    """A tensor of those that a matrix `[out, in]` is stored as."""

    dtypes: tuple[str, ...]  # dtypes of safetensors that it may have
    holds: Group = (1, 1)  # outputs and inputs that one of its numbers stands for
    turned: bool = False  # whether it is stored as [in, out]
    per_block: int | None = None  # so many of its numbers are an axis of their own, the last one

    def units(self, shape: Shape) -> Shape:
        """Outputs and inputs that one number stands for, in a matrix of this shape."""
        outs, ins = self.holds
        return shape[0] if outs is None else outs, shape[1] if ins is None else ins

    def stored_shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape of the tensor for a matrix of this shape."""
        stored = block_shape(self.stored_block(shape, whole_block(shape)))
        return stored[::-1] if self.turned else stored

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor for matrices of all experts, `[E, out, in]`, or for one matrix."""
        *experts, outs, ins = shape
        stored = (*experts, *self.stored_shape((outs, ins)))
        return stored if self.per_block is None else (*stored[:-1], stored[-1] // self.per_block, self.per_block)

    def stored_block(self, shape: Shape, block: Block) -> Block:
        """The part of the tensor for a block of whole words and groups, `[out, in]` whichever way it is stored."""
        units = self.units(shape)
        return tuple((start // unit, math.ceil(stop / unit)) for (start, stop), unit in zip(block, units, strict=True))


class Format(NamedTuple):
    """How each quantized matrix of a checkpoint is stored.

    Attributes:
        name: the format's name in messages.
        parts: end of a tensor's name -> what it holds; a matrix is quantized if it has the first one. It stands in place of
            "weight", or, of experts, after the name.
        dequantize: from tensors and the shape of the matrix, or of a block, to its numbers in float32.
        constants: tensors that say nothing new: end of the name -> what it must hold for a matrix of this shape.
        unused: ends of names of tensors about activations, which are not quantized here.
        others: variants that a matrix may have instead, as its tensors show.
        of_experts: it stores the matrices of all experts together, `[E, out, in]`, not single ones.
    """

    name: str
    parts: dict[str, StoredPart]
    dequantize: Callable[[Tensors, Shape], np.ndarray]
    constants: dict[str, Callable[[Shape], np.ndarray]]
    unused: tuple[str, ...]
    others: "tuple[Format, ...]" = ()
    of_experts: bool = False


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix that is stored as several tensors; stands among headers where that of a plain matrix would stand.

    Those of all experts `[E, out, in]` are dequantized like one matrix of `E * out` rows.
    """

    file: str  # file of the first tensor
    begin: int  # byte where the first tensor starts
    format: Format
    shape: tuple[int, ...]
    parts: dict[str, Header]  # by the ends of their names; two axes, as the format has them
    constants: dict[str, Header]  # constants that are there, unchecked

    @property
    def matrix(self) -> Shape:
        """Outputs, those of all experts together, and inputs."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def tiles(
        self, block: Block, period: int, read_fn: Callable[[Header, Block], np.ndarray]
    ) -> Iterator[tuple[Block, np.ndarray]]:
        """Yields a block in pieces: which part of the tensor, and its numbers in float32.

        Pieces have whole periods of rows, if the block has. `read_fn` reads a block of a tensor as it is stored.
        """
        *experts, outs, ins = block
        for outer in itertools.product(*(range(*part) for part in experts)):
            first = sum(outer) * self.shape[-2]
            of_one = ((first + outs[0], first + outs[1]), ins)
            for rows, numbers in self.dequantized(of_one, period, read_fn):
                place = (*((index, index + 1) for index in outer), (outs[0] + rows.start, outs[0] + rows.stop), ins)
                yield place, numbers[(None,) * len(outer)]

    def dequantized(
        self, block: Block, period: int, read_fn: Callable[[Header, Block], np.ndarray]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields pieces of a block of the matrix: which of its rows they are, and their numbers in float32.

        All tensors are read before the first piece comes, for the smallest block around `block` that consists of whole words
        and groups.
        """
        outs, ins, step = self._widened(block)
        step = math.lcm(step, period)
        stored = {}
        for suffix, part in self.format.parts.items():
            cut = part.stored_block(self.matrix, (outs, ins))
            tensor = read_fn(self.parts[suffix], cut[::-1] if part.turned else cut)
            stored[suffix] = np.ascontiguousarray(tensor.T) if part.turned else tensor
        (top, bottom), (left, right) = block
        rows = max(1, PIECE_NUMBERS // (ins[1] - ins[0]) // step) * step
        for start in range(*outs, rows):
            stop = min(start + rows, outs[1])
            piece = ((start - outs[0], stop - outs[0]), ins)
            tensors = {
                suffix: stored[suffix][slice(*part.stored_block(self.matrix, piece)[0])]
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
        units = [part.units(self.matrix) for part in self.format.parts.values()]
        steps = [math.lcm(*(unit[axis] for unit in units if unit[axis] < size)) for axis, size in enumerate(self.matrix)]
        outs, ins = (
            (start // step * step, min(size, math.ceil(stop / step) * step))
            for (start, stop), step, size in zip(block, steps, self.matrix, strict=True)
        )
        return outs, ins, steps[0]


def gather_quantized(
    format: Format, shapes: dict[str, tuple[int, ...]], tensors: dict[str, Header], problems: list[str]
) -> dict[str, Header | Quantized]:
    """`tensors` with one entry for each quantized matrix instead of the tensors that it is stored as.

    `shapes` are those that the config asks for, `[out, in]` however plain tensors are stored. A tensor that is missing, or has
    another shape or dtype than the format and the shape of its matrix ask for, is a problem.
    """
    rest = dict(tensors)
    matrices = {}
    main, first = next(iter(format.parts.items()))
    for name, shape in shapes.items():
        layer = name if format.of_experts else name.removesuffix("weight")
        header = tensors.get(layer + main)
        if (layer == name) != format.of_experts or len(shape) != 2 + format.of_experts or header is None:
            continue
        if header.dtype in FILE_DTYPES and header.dtype not in first.dtypes:  # the format leaves this matrix out
            continue
        variant = _variant(format, layer, shape, tensors)
        matrix = math.prod(shape[:-1]), shape[-1]
        parts = {}
        for suffix, part in variant.parts.items():
            found = rest.pop(layer + suffix, None)
            wanted = part.shape_in_file(shape)
            if found is None:
                problems.append(f"tensor {layer}{suffix} {list(wanted)} of the format {variant.name} is missing")
            elif problem := _misfit(found, wanted, part.dtypes):
                problems.append(f"tensor {layer}{suffix} {problem}")
            else:
                parts[suffix] = dataclasses.replace(found, shape=part.stored_shape(matrix))
        constants = {suffix: rest.pop(layer + suffix) for suffix in variant.constants if layer + suffix in rest}
        for suffix in variant.unused:
            rest.pop(layer + suffix, None)
        matrices[name] = Quantized(header.file, header.begin, variant, shape, parts, constants)
    return {**rest, **matrices}


def _variant(format: Format, layer: str, shape: tuple[int, ...], tensors: dict[str, Header]) -> Format:
    """The variant of `format` whose tensors the layer has, and best in shapes that fit; `format` if it has those of none."""
    there = [one for one in (format, *format.others) if all(layer + suffix in tensors for suffix in one.parts)]

    def fits(one: Format) -> bool:
        return not any(_misfit(tensors[layer + end], part.shape_in_file(shape), part.dtypes) for end, part in one.parts.items())

    return max(there, key=fits, default=format)  # the first one that fits, else the first


def _misfit(header: Header, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """Says what is wrong with a header, or ""; axes of length 1 may be left out or added, as writers differ in them."""
    if [size for size in header.shape if size != 1] != [size for size in shape if size != 1]:
        return f"has shape {list(header.shape)}, the format and the config ask for {list(shape)}"
    if header.dtype not in dtypes:
        return f"has the dtype {header.dtype}, the format has {' or '.join(dtypes)}"
    return ""
