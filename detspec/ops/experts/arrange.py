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
        experts, firsts, sizes: `[tiles]` each tile's expert, first row, and number of rows, a multiple of the unit. Tiles past
            the last have the expert and the first row of the last one, and no rows.
        num_tiles: `[1]`, how many tiles have rows.
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
    """Arranges pairs, whose experts are `ids [N]` int32, by expert and within an expert in their order.

    `tile` is the number of rows of a tile, a multiple of `unit`, at which each expert's rows begin.
    """
    N = ids.shape[0]
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    pairs = jnp.arange(N, dtype=jnp.int32)
    earlier = (ids[None] == ids[:, None]) & (pairs[None] < pairs[:, None])
    sizes = _up_to(_sum(ids[None] == experts[:, None]), unit)
    tiles = (sizes + tile - 1) // tile
    before = experts[None] < experts[:, None]  # [expert, whether another one is before it]
    starts = _sum(jnp.where(before, sizes[None], 0))
    ends = _sum(jnp.where(before, tiles[None], 0)) + tiles
    places = _sum(earlier) + _sum(jnp.where(experts[None] < ids[:, None], sizes[None], 0))
    places = jnp.where(ids < num_experts, places, NOWHERE)
    rows = jnp.arange(num_rows(N, num_experts, unit), dtype=jnp.int32)
    num_tiles = jnp.sum(tiles, dtype=jnp.int32)
    tile_ids = jnp.arange(max_tiles(N, num_experts, tile), dtype=jnp.int32)
    lasting = jnp.minimum(tile_ids, num_tiles - 1)  # the tile, or the last one
    own = jnp.clip(_sum(ends[None] <= lasting[:, None]), 0, num_experts - 1)
    within = (lasting - ends[own] + tiles[own]) * tile  # rows of the expert before the tile
    return Arrangement(
        places=places,
        pairs=_sum(jnp.where(places[None] == rows[:, None], pairs[None], 0)),
        experts=own,
        firsts=jnp.maximum(starts[own] + within, 0),
        sizes=jnp.where(tile_ids < num_tiles, jnp.minimum(sizes[own] - within, tile), 0),
        num_tiles=num_tiles[None],
    )


def _sum(numbers: jax.Array) -> jax.Array:
    """Sums over the last axis, or how many are true there."""
    return jnp.sum(numbers, axis=-1, dtype=jnp.int32)


def _up_to(sizes: jax.Array, unit: int) -> jax.Array:
    return (sizes + unit - 1) // unit * unit
