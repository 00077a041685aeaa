"""Which operations are fillers."""

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.problems.fillers import draw_fillers
from detspec.train.problems.parity import Parity
from detspec.train.problems.variables import Variables


def test_fillers_are_a_share_of_the_operations_and_never_all():
    rng = np.random.default_rng(0)
    assert [int(draw_fillers(rng, n, 0.8).sum()) for n in (1, 2, 3, 5, 10)] == [0, 1, 2, 4, 8]
    assert draw_fillers(rng, 4, 0.0).tolist() == [False] * 4


def test_every_operation_may_be_the_filler():
    rng = np.random.default_rng(0)
    assert {int(np.flatnonzero(draw_fillers(rng, 3, 0.3))[0]) for _ in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("n", [0, -1, 2.0])
def test_number_of_operations_that_is_none_is_refused(n: object):
    with pytest.raises(InputError, match="a positive number of operations, got"):
        draw_fillers(np.random.default_rng(0), n, 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.0, "0.5", True, float("nan")])
def test_share_outside_its_range_is_refused(share: object):
    for task in (Parity, Variables):
        with pytest.raises(InputError, match=rf"{task.__name__}\.filler must be a number in \[0, 1\), got"):
            task(filler=share)


def test_share_given_where_a_switch_is_asked_for_is_refused():
    for task in (Parity, Variables):
        with pytest.raises(InputError, match=rf"{task.__name__}\.up_to must be True or False, got 3: the share itself"):
            task(up_to=3)
