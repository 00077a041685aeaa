"""Runs of a block: worked out by hand on small arrays, and against numpy's slices."""

import itertools

import numpy as np
import pytest

from detspec.checkpoint.blocks import block_shape, runs


def test_runs_of_rows_and_columns_are_as_worked_out_by_hand():
    assert list(runs((8, 3), ((2, 4), (0, 3)), 100)) == [(6, 6)]
    assert list(runs((8, 3), ((2, 4), (0, 3)), 4)) == [(6, 4), (10, 2)]
    assert list(runs((3, 3), ((0, 3), (1, 3)), 100)) == [(1, 2), (4, 2), (7, 2)]
    assert list(runs((), (), 100)) == [(0, 1)]


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
@pytest.mark.parametrize("most", [1, 5, 1000])
def test_runs_are_the_numbers_of_the_slice(shape, most):
    """Every block whose axes are whole, the first half or the second half."""
    array = np.arange(np.prod(shape)).reshape(shape)
    ranges = [((0, size), (0, size // 2), (size // 2, size)) for size in shape]
    for block in itertools.product(*ranges):
        found = []
        for begin, size in runs(shape, block, most):
            assert 0 < size <= most
            found.extend(array.reshape(-1)[begin : begin + size])
        assert (np.array(found).reshape(block_shape(block)) == array[tuple(slice(*axis) for axis in block)]).all()
