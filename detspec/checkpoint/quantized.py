"""Quantized matrices of a folder: found among its tensors, and cut into pieces that consist of whole words and groups."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from detspec.checkpoint.blocks import Block, block_shape
from detspec.checkpoint.files import FILE_DTYPES, Header
from detspec.checkpoint.quantized_formats import Format, Part, Shape

PIECE_NUMBERS = 1 << 18  # of a matrix, that are dequantized at a time unless a group has more


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix that is stored as several tensors; stands among headers where that of a plain matrix would stand."""

    format: Format
    shape: Shape
    parts: dict[str, Header]  # by the ends of their names; axes of length 1 as the format has them
    constants: dict[str, Header]  # those that are there, unchecked

    @property
    def file(self) -> str:
        """Where the first part lies."""
        return next(iter(self.parts.values())).file

    @property
    def begin(self) -> int:
        """The byte at which the first part starts."""
        return next(iter(self.parts.values())).begin

    def widen(self, block: Block) -> Block:
        """The smallest block around `block` that consists of whole words and groups."""
        return tuple(
            (start // step * step, min(size, math.ceil(stop / step) * step))
            for (start, stop), step, size in zip(block, self._steps(), self.shape, strict=True)
        )

    def pieces(self, block: Block) -> Iterator[Block]:
        """A widened block in pieces of whole rows of it, words and groups."""
        (start, stop), ins = block
        step = self._steps()[0]
        rows = max(1, PIECE_NUMBERS // (ins[1] - ins[0]) // step) * step
        for row in range(start, stop, rows):
            yield (row, min(row + rows, stop)), ins

    def stored(self, part: Part, block: Block) -> Block:
        """What of `part` belongs to a widened block, `[out, in]` whichever way it is stored."""
        units = part.units(self.shape)
        return tuple((start // unit, math.ceil(stop / unit)) for (start, stop), unit in zip(block, units, strict=True))

    def dequantize(self, stored: dict[str, np.ndarray], block: Block, piece: Block) -> np.ndarray:
        """The numbers of a piece in float32, from what is stored for the widened block that it is part of."""
        tensors = {}
        for suffix, part in self.format.parts.items():
            (first, _), _ = self.stored(part, block)
            (start, stop), _ = self.stored(part, piece)
            tensors[suffix] = stored[suffix][start - first : stop - first]
        outs, ins = block_shape(piece)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for NaN and infinity
            return self.format.dequantize(tensors, (outs, ins))

    def _steps(self) -> Shape:
        """Outputs and inputs that a block must be cut at multiples of; an axis with one word or group is not cut for it."""
        units = [part.units(self.shape) for part in self.format.parts.values()]
        outs, ins = (math.lcm(*(unit[axis] for unit in units if unit[axis] < self.shape[axis])) for axis in (0, 1))
        return outs, ins


def gather_quantized(
    format: Format, shapes: dict[str, tuple[int, ...]], tensors: dict[str, Header], problems: list[str]
) -> dict[str, Header | Quantized]:
    """`tensors` with one entry for each quantized matrix in the place of the tensors that it is stored as.

    `shapes` are those that the config asks for. A tensor that is missing, or has another shape or dtype than the format and
    the shape of its matrix ask for, is a problem.
    """
    rest = dict(tensors)
    matrices = {}
    main, first = next(iter(format.parts.items()))
    for name, shape in shapes.items():
        layer = name.removesuffix("weight")
        if layer == name or len(shape) != 2 or layer + main not in tensors or _is_plain(tensors[layer + main], first):
            continue
        outs, ins = shape
        variant = _variant(format, layer, (outs, ins), tensors)
        parts = {}
        for suffix, part in variant.parts.items():
            header = rest.pop(layer + suffix, None)
            wanted = part.stored_shape((outs, ins))
            if header is None:
                problems.append(f"tensor {layer}{suffix} {list(wanted)} of the format {variant.name} is missing")
            elif problem := _misfit(header, wanted, part.dtypes):
                problems.append(f"tensor {layer}{suffix} {problem}")
            else:
                parts[suffix] = dataclasses.replace(header, shape=wanted)
        constants = {suffix: rest.pop(layer + suffix) for suffix in variant.constants if layer + suffix in rest}
        for suffix in variant.unused:
            rest.pop(layer + suffix, None)
        matrices[name] = Quantized(variant, (outs, ins), parts, constants)
    return {**rest, **matrices}


def _variant(format: Format, layer: str, shape: Shape, tensors: dict[str, Header]) -> Format:
    """The variant of `format` whose tensors the layer has, and best in shapes that fit; `format` if it has those of none."""
    there = [one for one in (format, *format.others) if all(layer + suffix in tensors for suffix in one.parts)]
    fitting = [
        one
        for one in there
        if not any(_misfit(tensors[layer + end], part.stored_shape(shape), part.dtypes) for end, part in one.parts.items())
    ]
    return next(iter([*fitting, *there, format]))


def _is_plain(header: Header, part: Part) -> bool:
    """Whether a tensor that is called like the first part is a matrix that the format leaves out."""
    return header.dtype in FILE_DTYPES and header.dtype not in part.dtypes


def _misfit(header: Header, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """What is wrong with a header, or ""; axes of length 1 may be left out or added, as writers differ in them."""
    if [size for size in header.shape if size != 1] != [size for size in shape if size != 1]:
        return f"has shape {list(header.shape)}, the format and the config ask for {list(shape)}"
    if header.dtype not in dtypes:
        return f"has the dtype {header.dtype}, the format has {' or '.join(dtypes)}"
    return ""
