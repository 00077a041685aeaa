"""Sums over rows: the fixed order gives a row the same bits among any number of rows, the backend's own does not."""

from functools import partial

import jax
import numpy as np
import pytest

from detspec.ops.row_sum import cpu_sum, fixed_sum, native_sum, sum_fn
from detspec.schedule import Numerics, Schedule
from tests.fakes import bits

pytestmark = pytest.mark.optimised

ROWS = (1, 2, 3, 8, 17, 64, 256)
LENGTHS = (1, 5, 64, 97, 688, 2048)


@partial(jax.jit, static_argnames=("summed_by",))
def sum_of_squares(x, *, summed_by):
    """As norms use it: the sum may be compiled into one loop with what comes before."""
    return summed_by(x, x)


summed = jax.jit(fixed_sum)
cpu = partial(cpu_sum, cache_dtype="float32")


def first_row_bits(summed_by, length: int) -> set[int]:
    rng = np.random.default_rng(length)
    x = rng.standard_normal((max(ROWS), length), np.float32)
    return {int(bits(sum_of_squares(x[:rows], summed_by=summed_by))[0]) for rows in ROWS}


@pytest.mark.parametrize("length", LENGTHS)
def test_fixed_sum_beside_any_number_of_rows_gives_the_same_bits(length):
    assert len(first_row_bits(fixed_sum, length)) == 1


def test_native_sum_beside_other_numbers_of_rows_gives_other_bits_somewhere():
    assert any(len(first_row_bits(native_sum, length)) > 1 for length in reversed(LENGTHS))


@pytest.mark.parametrize("length", LENGTHS)
def test_fixed_sum_in_groups_gives_the_bits_of_rows(length):
    x = np.random.default_rng(0).standard_normal((4, 6, length), np.float32)
    flat = bits(sum_of_squares(x.reshape(24, length), summed_by=fixed_sum))
    assert (bits(sum_of_squares(x, summed_by=fixed_sum)).reshape(-1) == flat).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_fixed_sum_equals_float64(length):
    x = np.random.default_rng(1).standard_normal((3, length), np.float32)
    # A tree of log2(2048) = 11 levels errs by at most 11 * 2**-24 of the sum of absolute values.
    np.testing.assert_array_less(np.abs(summed(x) - x.astype(np.float64).sum(-1)), 11 * 2.0**-24 * np.abs(x).sum(-1) + 1e-30)


def test_fixed_sum_adds_halves():
    """[a b c d] -> (a + c) + (b + d): 1e8 meets -1e8 first, so that 1 and 2 survive; from left to right 1 would be lost."""
    assert float(summed(np.float32([1e8, 1, -1e8, 2]))) == 3.0
    assert float(np.float32(1e8) + np.float32(1) + np.float32(-1e8) + np.float32(2)) == 2.0


@pytest.mark.parametrize("length", LENGTHS)
def test_cpu_sum_beside_any_number_of_rows_and_in_groups_gives_the_same_bits(length):
    assert len(first_row_bits(cpu, length)) == 1
    x = np.random.default_rng(0).standard_normal((4, 6, length), np.float32)
    assert (bits(cpu(x)).reshape(-1) == bits(cpu(x.reshape(24, length)))).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_cpu_sum_equals_float64(length):
    x = np.random.default_rng(1).standard_normal((3, length), np.float32)
    # Of 2048, a number goes through 8 additions of vectors, 4 levels above them, the last vector, and 4 halvings.
    np.testing.assert_array_less(np.abs(cpu(x) - x.astype(np.float64).sum(-1)), 17 * 2.0**-24 * np.abs(x).sum(-1) + 1e-30)


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_of_products_have_the_bits_of_sums_of_rounded_products(length):
    """A product that is added before it is rounded would give others."""
    x, y = np.random.default_rng(3).standard_normal((2, 5, length), np.float32)
    assert (bits(cpu(x, y)) == bits(cpu(x * y))).all()


def test_cpu_sum_has_an_order_of_its_own():
    """Inverse control: bits are compared above, and another order shows in them."""
    x = np.random.default_rng(2).standard_normal((8, max(LENGTHS)), np.float32)
    assert (bits(cpu(x)) != bits(summed(x))).any()


def test_sum_fn_takes_the_order_from_the_schedule():
    assert sum_fn(Numerics()) is fixed_sum
    assert sum_fn(Numerics(implementation="cpu")).func is cpu_sum
    assert sum_fn(Numerics(implementation="cpu", reductions="native")) is native_sum
    assert sum_fn(Numerics(reductions="native")) is native_sum
    assert sum_fn(Schedule().fast(4).numerics) is native_sum
