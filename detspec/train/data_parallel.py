r"""Slices of a batch, and the sum of their gradients on one chip or on several, with the same bits.

The number of slices depends on the batch alone, never on the number of chips.

    slices   0   1   2   3   4   5   6   7
              \ /     \ /     \ /     \ /      the pairs are the same on any number of chips;
               +       +       +       +       on two chips, slices 0 to 3 are on the first and 4 to 7 on the second,
                \     /         \     /        so only the last sum has to move
                   +               +
                     \           /
                           +                   on the first chip, which keeps the training state

Every gradient is worked out by one program, and every sum by another, each for a single chip. So how many chips there are
decides where a program runs, but not what is compiled. One program for all chips (`jax.shard_map`) would not do: XLA simplifies
a program for one chip in another order than a program for two. In jax 0.10 on CPUs, gradients through softmax then differ.
"""

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.errors import InputError
from detspec.model.params import Params

Pytree = Any  # float32 arrays
MAX_SLICES = 8  # also the most chips that a step can use


class Slice(NamedTuple):
    """Some rows of a batch, and what their losses are divided by, so that the losses of all slices add up to the batch's."""

    rows: Any  # pytree of numpy arrays `[B / S, ...]`, where `B` rows are cut into `S` slices
    counts: Any  # pytree of float32 scalars: numbers of tokens or problems in all `B` rows


def cut(batch: Any, counts_fn: Callable[[Any], Any]) -> list[Slice]:
    """The slices of `batch`, a pytree of numpy arrays `[B, ...]`, with the counts `counts_fn(batch)`.

    There are 8 slices or, if 8 does not divide `B`, the largest power of two that does:

        B = 32   8 slices of 4 rows        B = 2   2 slices of 1 row        B = 6   2 slices of 3 rows
    """
    B = jax.tree.leaves(batch)[0].shape[0]
    S = math.gcd(B, MAX_SLICES)
    counts = counts_fn(batch)
    ranges = [slice(first, first + B // S) for first in range(0, B, B // S)]
    return [Slice(jax.tree.map(itemgetter(rows), batch), counts) for rows in ranges]


def sum_over_slices(
    fn: Callable[[Params, Any], Pytree], params: Params, slices: Sequence[Any], *, chips: Sequence[jax.Device]
) -> Pytree:
    """The sum of `fn(params, slice)` over all slices, in the order of a binary tree; it ends on the first chip.

    Args:
        fn: jitted; runs on the chip where its arguments are.
        params: weights on the first chip. They are copied to the others.
        slices: pytrees of equal shapes, at least one.
        chips: each gets as many neighbouring slices as the others. If there are fewer slices, some chips do nothing.
    """
    chips = chips[: len(slices)]
    copies = copy_to(params, chips)

    def sum_from(first: int, number: int) -> Pytree:
        """Sum over `number` slices from `first` on, on the chip of the first of them."""
        index = first * len(chips) // len(slices)
        if number == 1:
            return fn(copies[index], jax.device_put(slices[first], chips[index]))
        half = number // 2
        left = sum_from(first, half)
        right = sum_from(first + half, number - half)
        return add(left, jax.device_put(right, chips[index]))

    return sum_from(0, len(slices))


def copy_to(params: Params, chips: Sequence[jax.Device]) -> list[Params]:
    """`params` on each of `chips`. Chips that have a copy pass it on, so that 8 chips take 3 rounds: 0-1, 01-23, 0123-4567."""
    copies = [jax.device_put(params, chips[0])]
    while len(copies) < len(chips):
        copies += [jax.device_put(copy, chip) for copy, chip in zip(copies, chips[len(copies) :], strict=False)]
    return copies


@jax.jit
def add(left: Pytree, right: Pytree) -> Pytree:
    """Sum of two pytrees, leaf by leaf."""
    return jax.tree.map(jnp.add, left, right)


def require_equal_shares(num_chips: int, num_slices: int) -> None:
    """Raises `InputError` unless `num_slices` can be dealt out evenly to `num_chips`."""
    if num_slices % num_chips:
        accepted = ", ".join(str(number) for number in range(1, num_slices + 1) if num_slices % number == 0)
        raise InputError(
            f"the run's first batch has {num_slices} slices, which {num_chips} chips cannot share: numbers that divide them "
            f"are {accepted}; for 8 chips, batches must have a multiple of 8 rows"
        )
