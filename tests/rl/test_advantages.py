"""Advantages against their formulas by hand, and rewards that are refused."""

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.rl.advantages import ADVANTAGES, EPSILON, advantages_of, checked_rewards

DEVIATION = 1 + EPSILON  # of 1, 2, 3


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("normalised", [-1 / DEVIATION, 0, 1 / DEVIATION]),
        ("centred", [-1, 0, 1]),
        ("leave_one_out", [1 - 2.5, 2 - 2, 3 - 1.5]),
        ("plain", [1, 2, 3]),
    ],
)
def test_advantages_by_hand_and_a_reward_of_none_is_left_out_of_the_baseline(kind, expected):
    whole, without = advantages_of([[1.0, 2.0, 3.0], [1.0, None, 2.0, 3.0]], kind)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(whole, expected, rtol=1e-15, atol=1e-15)
    assert np.isnan(without).tolist() == [False, True, False, False]
    assert without[[0, 2, 3]].tolist() == whole.tolist()


@pytest.mark.parametrize("kind", [kind for kind in ADVANTAGES if kind != "plain"])
def test_equal_rewards_have_advantages_of_exactly_zero_and_nearly_equal_ones_do_not(kind):
    equal, near, alone = advantages_of([[0.1] * 3, [0.1, 0.1, np.nextafter(0.1, 1)], [0.3, None]], kind)
    assert equal.tolist() == [0, 0, 0]
    assert near.any()
    assert alone[0] == 0  # there is nothing to compare it with
    assert np.std([0.1] * 3) > 0  # rounding alone would tell equal rewards apart


def test_groups_are_those_given_and_a_plain_reward_needs_no_other():
    found = advantages_of([[0.0, 1.0], [0.0, 1.0, 5.0]], "centred")
    assert [each.tolist() for each in found] == [[-0.5, 0.5], [-2.0, -1.0, 3.0]]
    assert advantages_of([[4.0]], "plain")[0].tolist() == [4.0]


def test_rewards_of_numbers_of_any_kind_become_floats():
    assert checked_rewards([["a", "b"], ["c"]], [[1, np.float32(0.5)], np.asarray([2.0])]) == [[1.0, 0.5], [2.0]]
    assert checked_rewards([["a"]], [[None]]) == [[None]]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([[1.0, float("nan")], [1.0]], "the reward of 'b' must be a finite number, or None to leave the text out, got nan"),
        ([[1.0, float("inf")], [1.0]], "got inf"),
        ([[1.0, True], [1.0]], "got True"),
        ([["0.5", 1.0], [1.0]], "the reward of 'a' .* got '0.5'"),
        ([[1.0], [1.0]], r"rewards must be one for each text, in \[2, 1\] a group, got \[1, 1\]"),
        ([[1.0, 2.0]], r"got \[2\]"),
        ([1.0, 2.0, 3.0], "rewards must be a list for each group, with a number or None for each text, got 1.0"),
        (None, "got None"),
    ],
)
def test_rewards_are_refused(rewards, message):
    with pytest.raises(InputError, match=message):
        checked_rewards([["a", "b"], ["c"]], rewards)
