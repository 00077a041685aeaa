"""Runs of a block: worked out by hand on small arrays, and against numpy's slices."""

import itertools

import numpy as np
import pytest

from detspec.checkpoint.blocks import Run, block_shape, is_rows, runs, slices


def test_runs_of_rows_and_columns_are_as_worked_out_by_hand():
    assert list(runs((8, 3), ((2, 4), (0, 3)), 100)) == [Run(6, 0, 6)]
    assert list(runs((8, 3), ((2, 4), (0, 3)), 4)) == [Run(6, 0, 4), Run(10, 4, 2)]
    assert list(runs((3, 3), ((0, 3), (1, 3)), 100)) == [Run(1, 0, 2), Run(4, 2, 2), Run(7, 4, 2)]
    assert list(runs((), (), 100)) == [Run(0, 0, 1)]
    assert is_rows((8, 3), ((2, 4), (0, 3)))
    assert not is_rows((8, 3), ((0, 8), (0, 2)))


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
@pytest.mark.parametrize("most", [1, 5, 1000])
def test_runs_are_the_numbers_of_the_slice(shape, most):
    """Every block whose axes are whole, the first half or the second half."""
    array = np.arange(np.prod(shape)).reshape(shape)
    ranges = [((0, size), (0, size // 2), (size // 2, size)) for size in shape]
    for block in itertools.product(*ranges):
        found = np.full(np.prod(block_shape(block)), -1)
        for begin, offset, size in runs(shape, block, most):
            assert 0 < size <= most
            found[offset : offset + size] = array.reshape(-1)[begin : begin + size]
        assert (found.reshape(block_shape(block)) == array[slices(block)]).all()
