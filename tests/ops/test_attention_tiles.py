"""Tiles of queries: their positions, and the sum of their splits."""

import jax
import numpy as np

from detspec.ops.attention.tiles import NO_POSITION, put_together, tile_positions

NONE = NO_POSITION


def test_positions_of_whole_and_odd_windows_fill_tiles_and_repeat_the_last():
    positions = np.array([[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]], np.int32)
    assert np.asarray(tile_positions(positions, 3, 2)).tolist() == [[4, 5], [6, 7], [8, 8], [0, 1], [2, 3], [4, 4]]
    assert np.asarray(tile_positions(positions, 1, 5)).tolist() == positions.tolist()


def test_positions_of_tiles_that_only_repeat_and_of_padding_are_none():
    positions = np.array([[4, 5, 5, 5, 5, 5], [6, 7, 8, 8, 8, 8], [NONE] * 6, [3] * 6], np.int32)
    found = np.asarray(tile_positions(positions, 3, 2)).reshape(4, 6).tolist()
    assert found == [[4, 5] + [NONE] * 4, [6, 7, 8, 8, NONE, NONE], [NONE] * 6, [3, 3] + [NONE] * 4]


def splits_of(score: np.ndarray, value: np.ndarray, num_splits: int) -> tuple[np.ndarray, np.ndarray]:
    """Attends in equal splits, as kernels do, to `score [X, K, rows, S]` and `value [X, K, S, H]`."""
    scores = np.stack(np.split(score, num_splits, axis=-1), axis=1)
    values = np.stack(np.split(value, num_splits, axis=2), axis=1)
    sums = np.exp(scores).sum(-1)
    attended = np.einsum("xnkrs,xnksh->xnkrh", np.exp(scores), values) / sums[..., None]
    return attended.astype(np.float32), np.log(sums).astype(np.float32)


def test_splits_put_together_equal_one_sum_whatever_is_left_in_memory_of_those_without_work():
    rng = np.random.default_rng(0)
    score = rng.standard_normal((3, 2, 4, 8)) * 9
    value = rng.standard_normal((3, 2, 8, 5))
    attended, lse = splits_of(score, value, 4)
    works = np.array([[True] * 4, [True, True, False, False], [False] * 4])
    attended[~works] = np.nan
    lse[~works] = np.nan
    got, got_lse = jax.device_get(jax.jit(put_together)(works, attended, lse))
    for x, num_keys in enumerate((8, 4)):
        whole, whole_lse = splits_of(score[x : x + 1, ..., :num_keys], value[x : x + 1, :, :num_keys], 1)
        # Averages of numbers of size 1 by weights that sum to 1, in float32.
        np.testing.assert_allclose(got[x], whole[0, 0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(got_lse[x], whole_lse[0, 0], rtol=1e-6, atol=0)
    assert (got[2] == 0).all()


def test_tiles_without_splits_keep_what_works_and_are_zero_elsewhere():
    attended = np.array([1.5, np.nan], np.float32).reshape(2, 1, 1, 1, 1)
    got, lse = put_together(np.array([[True], [False]]), attended, None)
    assert lse is None
    assert got.reshape(-1).tolist() == [1.5, 0.0]
