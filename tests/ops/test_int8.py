"""Products with weights in int8: the bits of whole numbers in numpy, for any rows, number of chips and implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.ops.linear.api import linear_fn, linears_fn
from detspec.ops.linear.int8 import MAX_INPUTS, QTensor, quantize, scaled_f32, sums
from detspec.schedule import Numerics
from tests.fakes import bits
from tests.ops.linear_contract import make_problem

pytestmark = pytest.mark.optimised

XLA = Numerics()
CPU = Numerics(implementation="cpu", linear="pinned")
NOT_FINITE = 2  # the rows of `made` that are special
ZERO, TINY, SMALL_STEPS = 3, 4, 5
SIZES = ((300, 77), (64, 129))  # inputs that fill no vector, outputs that fill no tile


def made(num_in: int, num_out: int, dtype: str, *, rows: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Rows of many magnitudes, some of them special, and a weight with a row of zeros."""
    x, weight = make_problem(num_in, num_out, dtype, rows=rows)
    x = x * (np.float32(10) ** (np.arange(rows) % 7 - 3).astype(np.float32)[:, None]).astype(x.dtype)
    x[NOT_FINITE, 1] = np.nan
    x[ZERO] = 0
    x[TINY] = 2.0**-24 if dtype == "float16" else 2.0**-60
    x[SMALL_STEPS] = np.arange(num_in) % 128 - 63.5  # the largest is 64 or 63.5, so halves are rounded
    weight[0] = 0
    return x.astype(dtype), weight


def rounded_by_numpy(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values as int64 and scales as float32, one operation of numpy after the other; rows are finite."""
    x_f32 = x.astype(np.float32)
    largest = np.abs(x_f32).max(-1)
    kept = largest >= 2.0**-50
    steps = np.where(kept, np.float32(127) / np.where(kept, largest, 1), 0).astype(np.float32)
    scale = np.where(kept, largest * np.float32(1 / 127), 0).astype(np.float32)
    return np.rint(x_f32 * steps[:, None]).astype(np.int64), scale


def product_by_numpy(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    (x_values, x_scale), (values, scale) = rounded_by_numpy(x), rounded_by_numpy(weight)
    return (x_values @ values.T).astype(np.float32) * x_scale[:, None] * scale


@pytest.mark.programs(40)  # a product for each number of rows
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_are_those_of_numpy_for_1_to_256_rows_by_xla_and_by_the_kernel(dtype):
    for num_in, num_out in SIZES:
        x, weight = made(num_in, num_out, dtype)
        finite = np.isfinite(x.astype(np.float32)).all(-1)
        with np.errstate(invalid="ignore"):
            expected = product_by_numpy(np.where(finite[:, None], x, 0), weight)
        rounded = jax.jit(quantize)(weight)
        assert np.asarray(rounded.values)[0].any() == np.asarray(rounded.scale)[0] == 0
        for numerics in (XLA, CPU):
            product = jax.jit(linear_fn(numerics))
            for rows in (1, 2, 3, 8, 70, 256):
                y = np.asarray(product(x[:rows], rounded))
                assert (bits(y)[finite[:rows]] == bits(expected[:rows])[finite[:rows]]).all(), (numerics, rows)
                assert np.isnan(y[~finite[:rows]]).all()


@pytest.mark.parametrize("numerics", [XLA, CPU], ids=["xla", "cpu"])
def test_bits_of_rows_that_are_used_stay_and_the_kernel_leaves_the_others_out(numerics):
    x, weight = made(*SIZES[0], "bfloat16", rows=70)
    rounded = jax.jit(quantize)(weight)
    whole = np.asarray(jax.jit(linear_fn(numerics))(x, rounded))
    used = np.arange(70) % 3 == 1
    got = np.asarray(jax.jit(lambda x, used: linears_fn(numerics, used)(x, rounded)[0])(x, used))
    assert (bits(got)[used] == bits(whole)[used]).all()
    if numerics is CPU:
        assert (got[~used] == 0).all()
        assert np.isnan(whole[NOT_FINITE]).all()  # one of those that are left out


def test_one_scale_for_all_rows_changes_with_the_neighbours():
    """The control: what happens without a scale for each row."""
    x, weight = made(*SIZES[0], "float32")
    rounded = quantize(weight)

    def product(x: np.ndarray) -> np.ndarray:
        whole = quantize(jnp.asarray(x).reshape(1, -1))
        return np.asarray(scaled_f32(sums(whole.values.reshape(x.shape), rounded.values), whole.scale, rounded.scale))

    others = x[8:40]
    assert (bits(product(others)[0]) != bits(product(others[:1])[0])).any()


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_bits_do_not_depend_on_what_xla_fuses_before_and_behind(implementation):
    """XLA leaves out roundings to two bytes before, and would make a multiply-add of the last product and a sum behind it."""
    numerics = Numerics(implementation=implementation)
    x, weight = (jnp.asarray(part, jnp.float32) for part in make_problem(96, 211, "float32", rows=40))
    rounded = quantize(weight)
    bias = weight[:, 0]

    def layer(x: jax.Array, rounded: QTensor, bias: jax.Array) -> jax.Array:
        first, second = linears_fn(numerics)((x * 1.25).astype(jnp.bfloat16), rounded, rounded)
        return first + bias[None] + second

    found = jax.jit(layer)(x, rounded, bias)
    y = product_by_numpy(np.asarray((x * 1.25).astype(jnp.bfloat16)), np.asarray(weight))
    assert (bits(found) == bits(y + np.asarray(bias) + y)).all()


def test_weight_that_does_not_fit_is_refused():
    rounded = quantize(jnp.ones((4, 8)))
    with pytest.raises(InputError, match=r"weight must be \[out, in\] for x \[..., in\], got weight \(4, 8\) for x \(3, 7\)"):
        linear_fn(XLA)(jnp.ones((3, 7)), rounded)
    with pytest.raises(InputError, match="all in int8 or all in floats, got both"):
        linears_fn(XLA)(jnp.ones((3, 8)), rounded, jnp.ones((4, 8)))
    too_long = jax.ShapeDtypeStruct((1, MAX_INPUTS + 1), jnp.float32)
    with pytest.raises(InputError, match="at most 133144 inputs, whose sum int32 holds; got 133145"):
        jax.eval_shape(lambda x: linear_fn(XLA)(x, quantize(x)), too_long)
