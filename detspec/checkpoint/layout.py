"""How tensors of a checkpoint hold weights: several in one, in turns, turned; as a table of names says it, and as indices.

Sizes are those of the weights, so a layout needs no config.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from detspec.checkpoint.blocks import Block
from detspec.errors import InputError

Shape = tuple[int, ...]
Axis = TypeVar("Axis")


class Cut(NamedTuple):
    """The place of a weight in a tensor: along `axis`, index i is the tensor's `begin + i`, or in turns
    `i // turn * period + begin + i % turn`; other axes are whole.

    In turns of 2, `k` of `[q0 q1 k0 k1 q2 q3 k2 k3]` has `begin=2, turn=2, period=4`.
    """

    axis: int
    begin: int
    turn: int | None = None
    period: int = 1

    def hull(self, block: Block) -> Block:
        """The smallest block of the tensor around a block of the weight; in turns, of whole periods."""
        start, stop = block[self.axis]
        if self.turn is None:
            around = (self.begin + start, self.begin + stop)
        else:
            around = (start // self.turn * self.period, math.ceil(stop / self.turn) * self.period)
        return (*block[: self.axis], around, *block[self.axis + 1 :])

    def taken(self, numbers: np.ndarray, begin: int, wanted: tuple[int, int]) -> tuple[slice, np.ndarray]:
        """The numbers of the weight among those of the tensor from index `begin` of the axis on, and where they belong.

        `wanted` are the first and the last index + 1 of the weight, the slice counts from the first. In turns, there are whole
        periods.
        """
        before = (slice(None),) * self.axis
        first = begin - self.begin
        if self.turn is not None:
            shape = numbers.shape
            count = shape[self.axis] // self.period
            numbers = numbers.reshape(*shape[: self.axis], count, self.period, *shape[self.axis + 1 :])
            numbers = numbers[(*before, slice(None), slice(self.begin, self.begin + self.turn))]
            numbers = numbers.reshape(*shape[: self.axis], count * self.turn, *shape[self.axis + 1 :])
            first = begin // self.period * self.turn
        start, stop = wanted
        low = max(start, first)
        high = min(stop, first + numbers.shape[self.axis])
        return slice(low - start, high - start), numbers[(*before, slice(low - first, high - first))]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The weights that a tensor holds, and how.

    `in_layer("q", "k", "v")` has the rows of q, then those of k, then those of v. A tensor `[in, out]` is `turned`.

    Attributes:
        paths: of the weights in the pytree, in the order in which they lie along `axis`; `{}` is the index of the layer.
        axis: of the weights, `[out, in]`; 1 if the first one is that of experts.
        turn: how many indices of each weight come in turn, such as the rows of a head; None: all of them.
        turned: whether the last two axes are exchanged in the file.
        skipped: how many indices come before the first weight that no text reads. They are not read, and written as zeros.
        ones: how many axes of length 1 the tensor has before those of the weights.
    """

    paths: tuple[tuple[str, ...], ...]
    axis: int = 0
    turn: int | None = None
    turned: bool = False
    skipped: int = 0
    ones: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is one weight as it is."""
        return self == Layout(self.paths[:1])

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the tensor for weights of these shapes; `InputError` if they do not lie together so."""
        lengths = [shape[self.axis] for shape in shapes]
        others = {(*shape[: self.axis], *shape[self.axis + 1 :]) for shape in shapes}
        if len(others) > 1 or (self.turn is not None and (len(set(lengths)) > 1 or lengths[0] % self.turn or self.skipped)):
            raise InputError(f"weights {' '.join(map(str, shapes))} cannot lie in one tensor as {self}")
        first = shapes[0]
        fused = (*first[: self.axis], self.skipped + sum(lengths), *first[self.axis + 1 :])
        return (1,) * self.ones + self.in_file(fused)

    def in_file(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Sizes, or first and last indices, of the axes in the order of the file."""
        return (*axes[:-2], axes[-1], axes[-2]) if self.turned else axes

    def cuts(self, shapes: Sequence[Shape]) -> tuple[Cut, ...]:
        """The place of each of the weights in the tensor, whose axes are in the order of theirs, without `ones`."""
        if self.turn is not None:
            return tuple(Cut(self.axis, i * self.turn, self.turn, len(shapes) * self.turn) for i in range(len(shapes)))
        lengths = [shape[self.axis] for shape in shapes[:-1]]
        return tuple(Cut(self.axis, begin) for begin in itertools.accumulate(lengths, initial=self.skipped))

    def fused(self, weights: Sequence[jax.Array | np.ndarray]) -> np.ndarray:
        """The tensor that is made of the weights; the inverse of reading it."""
        arrays = [np.asarray(weight) for weight in weights]
        if self.turn is not None:
            shape = arrays[0].shape
            split = (*shape[: self.axis], -1, self.turn, *shape[self.axis + 1 :])
            together = np.stack([array.reshape(split) for array in arrays], self.axis + 1)
            whole = together.reshape(*shape[: self.axis], -1, *shape[self.axis + 1 :])
        else:
            unread = (*arrays[0].shape[: self.axis], self.skipped, *arrays[0].shape[self.axis + 1 :])
            whole = np.concatenate([np.zeros(unread, arrays[0].dtype), *arrays], self.axis)
        return (whole.swapaxes(-1, -2) if self.turned else whole)[(None,) * self.ones]


WHOLE = Layout(((),))  # a tensor that is one weight


def in_layer(*leaves: str, axis: int = 0, turn: int | None = None, turned: bool = False, ones: int = 0) -> Layout:
    """The layout of a tensor of a layer that holds these of its weights."""
    return Layout(tuple(("layers", "{}", leaf) for leaf in leaves), axis, turn, turned, ones=ones)
