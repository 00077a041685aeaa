"""Which drafts are verified: the most that is expected of them for the windows of a pass."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.generation.allot import allotted, expected, pays
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import Draft

B, D = 3, 7
allotted_at_once = jax.jit(allotted, static_argnames="schedule")


def draft_of(count, chance) -> Draft:
    tokens = jnp.zeros((B, D), jnp.int32)
    count, chance = np.asarray(count, np.int32), np.asarray(chance, np.float32)
    return Draft(tokens, tokens.astype(jnp.float32), count, chance, np.zeros(B, bool), cache=None)  # type: ignore[arg-type]


def allot(count, chance, wanted, before, schedule) -> list[int]:
    given = draft_of(count, chance), np.asarray(wanted, bool), np.asarray(before, np.int32)
    return allotted_at_once(*given, schedule=schedule).tolist()


def value(chance: float, count: int) -> float:
    return sum(min(chance, 0.999) ** i for i in range(1, count + 1))


@pytest.mark.parametrize("alignment", ["free", "window"])
@hypothesis.given(
    st.lists(st.integers(0, D), min_size=B, max_size=B),
    st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=B, max_size=B),
    st.lists(st.booleans(), min_size=B, max_size=B),
    st.lists(st.integers(0, 3), min_size=B, max_size=B),
)
def test_windows_go_to_the_drafts_that_are_worth_most(alignment, count, chance, wanted, length):
    """Against all ways to hand out what is left of passes of 4 windows of 4."""
    schedule = Schedule(Numerics(alignment=alignment), Budget(16, 4))
    found = allot(count, chance, wanted, length, schedule)
    before = [place if alignment == "window" else 0 for place in length]
    offered = [n if is_wanted else 0 for n, is_wanted in zip(count, wanted, strict=True)]
    needed = [1 + (place + n) // 4 if w else 0 for place, n, w in zip(before, found, wanted, strict=True)]
    room = -(-sum(wanted) // 4) * 4
    assert sum(needed) <= room
    assert all(0 <= n <= most for n, most in zip(found, offered, strict=True))
    ways = itertools.product(*[range(n + 1) for n in offered])
    fits = [
        way
        for way in ways
        if sum(1 + (place + n) // 4 if w else 0 for place, n, w in zip(before, way, wanted, strict=True)) <= room
    ]
    best = max(sum(map(value, chance, way)) for way in fits)
    assert sum(map(value, chance, found)) == pytest.approx(best, rel=1e-5)


def test_surer_drafts_take_the_windows_of_others():
    schedule = Schedule(budget=Budget(16, 4))
    assert allot([7, 7, 7], [0.2, 0.9, 0.5], [True] * 3, [5, 6, 7], schedule) == [3, 7, 3]
    assert allot([0, 7, 7], [0.2, 0.9, 0.5], [False, True, True], [5, 6, 7], schedule) == [0, 7, 7]


@pytest.mark.parametrize(
    ("gain", "wanted", "cost", "expected"),
    [
        ([0.4, 0.4, 0.4], [1, 1, 1], 1.3, True),  # 3 x 1.4 tokens in the time of 3 x 1.3
        ([0.4, 0.4, 0.4], [1, 1, 1], 1.5, False),
        ([9.0, 0.0, 0.0], [1, 1, 1], 1.2, True),  # rows are nearly free: the others are slowed down by a fifth
        ([9.0, 0.0, 0.0], [1, 1, 1], 1.3, False),  # by more than a quarter
        ([9.0, 0.0, 0.0], [1, 0, 0], 4.0, True),  # it is alone
        ([0.0, 0.0, 0.0], [1, 1, 1], 0.0, True),  # always
        ([9.0, 9.0, 9.0], [1, 1, 1], np.inf, False),  # never
    ],
)
def test_drafts_are_read_where_they_bring_more_for_the_time_and_slow_no_sequence_down(gain, wanted, cost, expected):
    assert bool(pays(jnp.float32(gain), np.asarray(wanted, bool), np.float32(cost))) == expected


def test_expected_tokens_are_a_geometric_sum():
    found = expected(jnp.float32([0.5, 0.9, 0.0, 1.0]), jnp.int32([3, 2, 5, 4]))
    np.testing.assert_allclose(found, [0.875, 1.71, 0.0, value(1.0, 4)], rtol=1e-4)
