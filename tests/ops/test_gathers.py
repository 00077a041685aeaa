"""Sums of rows by their names, as the derivative of a lookup needs them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.ops.gathers import rows_of, sum_by_row, sum_neighbours, take_with_derivative
from detspec.ops.master import Master

R, V, D = 32, 6, 3
NAMES = {"alike": np.full(R, 2), "mixed": np.random.default_rng(0).integers(0, 5, R), "descending": np.arange(R)[::-1] // V}
neighbours, by_row = (jax.jit(partial(fn, size=V)) for fn in (sum_neighbours, sum_by_row))


def exact_sums(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    sums = np.zeros((V, D))
    np.add.at(sums, rows, x.astype(np.float64))
    return sums


@pytest.mark.parametrize("name", NAMES)
def test_sums_by_row_are_those_of_numpy_and_sums_of_neighbours_are_too(name):
    """Integers, so that no sum is rounded; the last row has no name."""
    rows = NAMES[name].astype(np.int32)
    x = np.random.default_rng(1).integers(-99, 99, (R, D)).astype(np.float32)
    assert (neighbours(x, rows) == exact_sums(x, rows)).all()
    assert (by_row(x, rows) == exact_sums(x, rows)).all()


def test_sum_of_a_name_is_right_within_rounding_and_has_the_same_bits_whatever_others_hold():
    """Names decide the order: a sum is another one only if rows of its own are."""
    rows = NAMES["mixed"].astype(np.int32)
    x = np.random.default_rng(2).standard_normal((R, D)).astype(np.float32)
    found = np.asarray(neighbours(x, rows))
    np.testing.assert_allclose(found, exact_sums(x, rows), rtol=0, atol=1e-5)  # some ten float32 sums of size 5
    beside = np.asarray(neighbours(np.where((rows == 3)[:, None], x, np.float32(1e30)), rows))
    assert beside[3].tobytes() == found[3].tobytes()
    assert beside[2].tobytes() != found[2].tobytes()


def test_derivative_of_a_lookup_adds_what_each_row_is_looked_up_for_in_the_dtype_of_the_master():
    table = jnp.arange(12, dtype=jnp.float32).reshape(4, 3) / 7
    rows = jnp.asarray([[1, 3], [1, 1]], jnp.int32)
    factors = jnp.arange(12, dtype=jnp.float32).reshape(2, 2, 3) + 0.5

    def total(table: jax.Array) -> jax.Array:
        found = take_with_derivative(rows_of)(Master.of(table, jnp.bfloat16), rows)
        assert found.dtype == jnp.bfloat16
        return (found.astype(jnp.float32) * factors).sum()

    of_rows = np.asarray(factors).reshape(4, 3)
    expected = np.stack([np.zeros(3), of_rows[0] + of_rows[2] + of_rows[3], np.zeros(3), of_rows[1]])
    assert (jax.jit(jax.grad(total))(table) == expected).all()
