r"""The sum of all slices' gradients, worked out on one chip or on several, with the same bits.

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

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from detspec.errors import InputError
from detspec.model.params import Params

Pytree = Any  # of float32 arrays


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
