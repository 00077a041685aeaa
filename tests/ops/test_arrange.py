"""Rows in the order of their experts, against a loop; how many there can be."""

import jax
import numpy as np
import pytest

from detspec.ops.experts.arrange import NOWHERE, Arrangement, arrange, max_tiles, num_rows

arranged = jax.jit(arrange, static_argnums=1, static_argnames=("tile", "unit"))


def by_a_loop(ids: np.ndarray, num_experts: int, tile: int, unit: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Places of pairs, and each tile's expert, first row and number of rows."""
    places, tiles, row = np.full(len(ids), NOWHERE), [], 0
    for expert in range(num_experts):
        mine = np.flatnonzero(ids == expert)
        places[mine] = row + np.arange(len(mine))
        rows = -(-len(mine) // unit) * unit
        tiles += [(expert, row + first, min(tile, rows - first)) for first in range(0, rows, tile)]
        row += rows
    return places, tiles


@pytest.mark.parametrize(("num_experts", "tile", "unit"), [(5, 8, 8), (3, 2, 1), (128, 64, 8)])
def test_pairs_lie_in_tiles_of_their_experts_in_their_order(num_experts, tile, unit):
    rng = np.random.default_rng(0)
    drawn = rng.integers(-2, num_experts + 2, 40)
    none = np.where(np.arange(40) % 2, -1, 2**31 - 1)
    for ids in (drawn, np.full(40, num_experts - 1), none, np.where(np.arange(40) == 7, 1, none), np.arange(40) % num_experts):
        found = Arrangement(*map(np.asarray, arranged(ids.astype(np.int32).reshape(-1, 2), num_experts, tile=tile, unit=unit)))
        places, tiles = by_a_loop(ids, num_experts, tile, unit)
        assert (found.places == places).all()
        there = np.flatnonzero(places != NOWHERE)
        assert (found.pairs[places[there]] == there).all()
        assert found.num_tiles == len(tiles)
        listed = [*zip(found.experts.tolist(), found.firsts.tolist(), found.sizes.tolist(), strict=True)]
        assert listed[: len(tiles)] == tiles
        assert {rows for *_, rows in listed[len(tiles) :]} <= {0}
        assert found.experts.max() < num_experts


def test_pairs_of_one_row_are_tiles_of_their_own():
    found = Arrangement(*map(np.asarray, arranged(np.asarray([[7, 3, 9, -1]], np.int32), 9, tile=64, unit=8)))
    assert found.places.tolist() == [0, 8, NOWHERE, NOWHERE]
    assert found.pairs.tolist() == np.arange(4).repeat(8).tolist()
    assert found.experts.tolist() == [7, 3, 8, 0]
    assert found.firsts.tolist() == [0, 8, 16, 24]
    assert found.sizes.tolist() == [8, 8, 0, 0]
    assert found.num_tiles == 4


SIZES = [(5, 3, 4, 4), (70, 3, 8, 1), (2048, 128, 64, 8), (9, 9, 8, 8)]


@pytest.mark.parametrize(("num_pairs", "num_experts", "tile", "unit"), SIZES)
def test_the_most_tiles_and_rows_are_reached_and_not_passed(num_pairs, num_experts, tile, unit):
    """Tries all pairs with one expert but one for each other expert, which fills the most tiles, and pairs that are spread."""
    most = max_tiles(num_pairs, num_experts, tile)
    crowded = by_a_loop(np.minimum(np.arange(num_pairs), num_experts - 1), num_experts, tile, unit)[1]
    spread = by_a_loop(np.arange(num_pairs) * num_experts // num_pairs, num_experts, tile, unit)[1]
    assert len(crowded) == most
    assert len(spread) <= most
    for tiles in (crowded, spread):
        assert sum(rows for *_, rows in tiles) <= num_rows(num_pairs, num_experts, unit)
