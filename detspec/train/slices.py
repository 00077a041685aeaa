"""Batches cut into slices of rows, whose number depends on the batch alone and never on the number of chips."""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import jax

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
