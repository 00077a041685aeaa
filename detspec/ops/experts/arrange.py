"""Rows in the order of their experts, cut into tiles of one expert each, for kernels that read each expert once.

    ids of 3 rows, k = 2     [[2, 0], [2, 9], [0, 2]]     9: no expert
    pairs by expert          expert 0: pairs 1 4          expert 2: pairs 0 2 5
    rows, in units of 2      1 4 | 0 2 5 .                tiles of 2 from row 0 (expert 0), 2 (expert 2), 4 (expert 2)

A pair's place is the number of pairs before it, by comparison of all with all, which is one fused sum; a sort takes dozens of
passes. 256 rows of 8 experts are 4 million comparisons, a few microseconds of a GPU or TPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NOWHERE = jnp.iinfo(jnp.int32).max  # the place of a pair without an expert: outside of any array


class Arrangement(NamedTuple):
    """Places of `N` pairs of a row and an expert, and the tiles they fill: all int32.

    Attributes:
        places: `[N]`, where each pair's row lies; `NOWHERE` without an expert.
        pairs: `[rows]`, the pair of each row; 0 where there is none.
        experts, firsts, sizes: `[tiles]`, each tile's expert, first row, and number of rows, a multiple of the unit.
        num_tiles: `[1]`, how many tiles there are; those past them have no rows.
    """

    places: jax.Array
    pairs: jax.Array
    experts: jax.Array
    firsts: jax.Array
    sizes: jax.Array
    num_tiles: jax.Array


def num_rows(num_pairs: int, num_experts: int, unit: int) -> int:
    """Most rows that `num_pairs` fill, where each expert's are rounded up to `unit`."""
    return num_pairs + (unit - 1) * min(num_pairs, num_experts)


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """Most tiles that `num_pairs` fill: each expert with pairs has one, and there is one more for each `tile` further pairs."""
    least = min(num_pairs, num_experts)
    return least + (num_pairs - least) // tile


def arrange(ids: jax.Array, num_experts: int, *, tile: int, unit: int) -> Arrangement:
    """Arranges pairs, whose experts are `ids [R, k]` int32, by expert and within an expert in their order.

    `tile` is the number of rows of a tile; each expert's rows begin at a multiple of `unit`. Both are powers of 2. The experts
    of a single row are different ones, so its pairs are tiles in any order.
    """
    return _of_one_row(ids[0], num_experts, unit) if ids.shape[0] == 1 else _by_expert(ids.reshape(-1), num_experts, tile, unit)


def _of_one_row(ids: jax.Array, num_experts: int, unit: int) -> Arrangement:
    """Tiles of one pair each, in the order of pairs; without rows where there is no expert."""
    k = ids.shape[0]
    there = (ids >= 0) & (ids < num_experts)
    pairs = jnp.arange(k, dtype=jnp.int32)
    return Arrangement(
        places=jnp.where(there, unit * pairs, NOWHERE),
        pairs=jnp.repeat(pairs, unit),
        experts=jnp.clip(ids, 0, num_experts - 1),
        firsts=unit * pairs,
        sizes=jnp.where(there, unit, 0),
        num_tiles=jnp.full(1, k, jnp.int32),
    )


def _by_expert(ids: jax.Array, num_experts: int, tile: int, unit: int) -> Arrangement:
    """Compares all pairs with all, `ids [N]`."""
    N = ids.shape[0]
    there = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(there, ids, num_experts)
    pairs = jnp.arange(N, dtype=jnp.int32)
    same = ids[:, None] == ids[None]  # [pair, whether another one has its expert]
    after = ids[:, None] > ids[None]
    ranks = _sum(same & (pairs[:, None] > pairs[None]))  # among the pairs of the expert
    left = _sum(same) - ranks  # pairs of the expert from this one on
    # Remainders by bits: at divisions XLA would begin another kernel.
    places = jnp.where(there, unit * _sum(after & (ranks & (unit - 1) == 0)[None]) + ranks, NOWHERE)
    begins = there & (ranks & (tile - 1) == 0)  # whether a tile begins with the pair
    tile_places = tile * _sum(after & begins[None]) + ranks  # places, if each tile were full
    rows = jnp.arange(num_rows(N, num_experts, unit), dtype=jnp.int32)
    tiles = jnp.arange(max_tiles(N, num_experts, tile), dtype=jnp.int32)
    own = begins[None] & (tile_places[None] == tile * tiles[:, None])  # [tile, whether it begins with a pair]
    beginning = _sum(jnp.where(own, pairs[None], 0))
    num_tiles = _sum(begins[None])
    return Arrangement(
        places=places,
        pairs=_sum(jnp.where(places[None] == rows[:, None], pairs[None], 0)),
        experts=jnp.minimum(ids[beginning], num_experts - 1),
        firsts=places[beginning],
        sizes=jnp.where(tiles < num_tiles, jnp.minimum((left[beginning] + unit - 1) & -unit, tile), 0),
        num_tiles=num_tiles,
    )


def _sum(numbers: jax.Array) -> jax.Array:
    """Sums over the last axis, or how many are true there."""
    return jnp.sum(numbers, axis=-1, dtype=jnp.int32)
