"""Whether two results are the same bits, and where they first part."""

from collections.abc import Sequence

import jax
import numpy as np


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`[...]` bool, True where elements of `a` and `b`, of one shape and of dtypes of one size, have the same bits."""
    unsigned = np.dtype(f"uint{8 * a.dtype.itemsize}")
    return np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)


def first_difference(pairs: Sequence[tuple[np.ndarray, np.ndarray]], where: np.ndarray | None = None) -> tuple[int, ...] | None:
    """The first index, in order, at which the bits of any pair of arrays of one shape differ; None if nowhere.

    Differences count where `where`, bool of the same shape, is True; everywhere if it is None.
    """
    differs = np.zeros(pairs[0][0].shape, bool)
    for a, b in pairs:
        differs |= ~same_bits(a, b)
    if where is not None:
        differs &= where
    return tuple(map(int, np.unravel_index(np.argmax(differs), differs.shape))) if differs.any() else None


def differing_copies(array: jax.Array) -> str:
    """Names the chips of this process that hold other bits of an array that all hold whole; "" if they agree."""
    first, *others = array.addressable_shards
    for other in others:
        if not same_bits(np.asarray(first.data), np.asarray(other.data)).all():
            return f"{other.device} holds other bits than {first.device} of what all chips should hold alike"
    return ""
