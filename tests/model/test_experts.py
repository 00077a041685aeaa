"""Softmaxes of routers have the same bits among any number of rows; the control leaves their maximum to XLA as a reduction."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.environment import default_schedule
from detspec.model.experts import softmax
from detspec.model.rows import canonical_ops
from detspec.ops.row_sum import elementwise_max
from tests.fakes import RANDOM_CFG, bits

pytestmark = pytest.mark.optimised

OPS = canonical_ops(RANDOM_CFG, default_schedule(RANDOM_CFG).numerics)
ROWS = 1024


def logits(num: int) -> np.ndarray:
    return np.random.default_rng(num).normal(0, 2, (ROWS, num)).astype(np.float32)


def num_differing(softmax_fn: Callable[[jax.Array], jax.Array], num: int) -> int:
    """How many weights of `num` experts have other bits among 64 or 1,024 rows than among 8."""
    of_rows = jax.jit(softmax_fn)
    x = logits(num)
    few, some, all_rows = (
        np.concatenate([bits(of_rows(x[first : first + rows])) for first in range(0, ROWS, rows)]) for rows in (8, 64, ROWS)
    )
    return int((few != some).sum() + (few != all_rows).sum())


@pytest.mark.parametrize("num", [4, 8, 60, 128])
def test_softmax_of_any_number_of_experts_has_the_same_bits_among_any_rows(num: int):
    assert num_differing(lambda x: softmax(x, OPS), num) == 0


def test_control_softmax_after_a_maximum_by_reduction_has_other_bits_among_many_rows():
    def reduced(x: jax.Array) -> jax.Array:
        powers = jnp.exp(x - x.max(-1, keepdims=True))
        return powers / OPS.sum_row(powers)[:, None]

    assert sum(num_differing(reduced, num) for num in (8, 128)) > 0


@pytest.mark.parametrize("num", [1, 5, 128])
def test_elementwise_max_is_the_maximum_and_nan_where_there_is_one(num: int):
    x = logits(num)
    x[3, -1], x[4, 0], x[5] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(jax.jit(elementwise_max)(x), x.max(-1))
