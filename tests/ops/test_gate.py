"""Gates: values and rounding are right, and one kernel gives a gate and its products the bits of two."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.model.dense import dense_config
from detspec.model.rows import canonical_ops, exact_ops
from detspec.ops.experts.api import experts_fn, gated_experts_fn
from detspec.ops.gate import ACTIVATION_FNS, IN_C, cpu_gated, gated
from detspec.ops.linear.api import gate_fn, gated_fn, linears_fn
from detspec.ops.linear.int8 import quantize
from detspec.schedule import Numerics
from tests.fakes import bits

CPU = Numerics(implementation="cpu", linear="pinned", cache_dtype="float32")
DTYPES = ("float32", "bfloat16", "float16")


def run(activation: str, dtype: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(partial(cpu_gated, activation=activation, dtype=dtype))(gate, up))


def exact(activation: str, x: np.ndarray) -> np.ndarray:
    """The activation in float64; GELU by tanh with 1 + tanh(u) = 2 / (1 + exp(-2 u)), so that nothing is lost."""
    x = x.astype(np.float64)
    z = x if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-z))


@pytest.mark.parametrize("activation", IN_C)
def test_kernel_gates_to_the_precision_of_float32(activation):
    rng = np.random.default_rng(0)
    gate = np.concatenate([np.linspace(-20, 20, 4001), 4 * rng.standard_normal(999)]).astype(np.float32)[None]
    up = rng.standard_normal(gate.shape, np.float32)
    np.testing.assert_allclose(run(activation, "float32", gate, up), exact(activation, gate) * up, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_says_of_large_and_broken_numbers_what_xla_says(dtype):
    gate = np.float32([[0.0, -0.0, 100, -100, 1e30, np.inf, np.nan, 1, 1, 1, -np.inf]])
    up = np.float32([[1, 1, 1, 1, 1, 1, 1, np.inf, np.nan, -np.inf, 1]])
    found = run("silu", dtype, gate, up)
    expected = np.asarray(gated(gate, up, activation="silu", dtype=dtype))
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernel_rounds_to_the_nearest_and_among_two_to_the_even_one(dtype):
    """`silu(128)` is 128, so the kernel gives `up / 128 * 128`. `up` is every number of the dtype, and every middle of two."""
    every = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype)).astype(np.float32)
    every = every[np.isfinite(every) & (np.abs(every) > (1e-30 if dtype == "bfloat16" else -1)) & (np.abs(every) < 1e30)]
    between = (np.sort(every)[:-1] / 2 + np.sort(every)[1:] / 2).astype(np.float32)
    up = np.concatenate([every, between, np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf))])
    up = np.concatenate([up, np.float32([65519, 65520, 1e6])])[None] if dtype == "float16" else up[None]
    found = run("silu", dtype, np.full_like(up, 128), up / 128)
    with np.errstate(over="ignore"):
        assert (bits(found) == bits(up.astype(jnp.dtype(dtype)))).all()


def test_activations_without_a_kernel_are_those_of_xla():
    gate, up = np.random.default_rng(0).standard_normal((2, 3, 40), np.float32)
    for activation in set(ACTIVATION_FNS) - set(IN_C):
        found = gate_fn(CPU)(gate, up, activation=activation, dtype="float32")
        assert (found == gated(gate, up, activation=activation, dtype="float32")).all()


@pytest.mark.optimised
@pytest.mark.programs(30)
@pytest.mark.parametrize("shape", [(64, 48), (96, 7), (2500, 130)])  # of a few outputs, and of several segments of inputs
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_in_one_kernel_with_its_products_has_the_bits_of_both(dtype, shape):
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.standard_normal(shape[::-1]) / 8, dtype) for _ in range(2))
    x = jnp.asarray(rng.standard_normal((300, shape[0])), dtype)
    used = jnp.asarray(rng.random(300) < 0.7)

    def both(x, used, activation, gate=gate):
        apart = gate_fn(CPU)(*linears_fn(CPU, used)(x, gate, up), activation=activation, dtype=x.dtype)
        return gated_fn(CPU, used)(x, gate, up, activation), apart

    for activation in IN_C:
        whole = None
        for rows in (300, 130, 33, 9, 8, 3, 1):
            for which in (None, used[:rows]):
                together, apart = jax.jit(partial(both, activation=activation))(x[:rows], which)
                assert (bits(together) == bits(apart)).all()
                if which is None:
                    whole = bits(together) if whole is None else whole
                    assert (bits(together) == whole[:rows]).all()
    _, other = jax.jit(partial(both, activation="silu", gate=up))(x, None)
    assert (bits(other) != whole).any()


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_experts_in_one_kernel_have_the_bits_of_both(dtype):
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.standard_normal((5, 40, 100)) / 8, dtype) for _ in range(2))
    for rows in (1, 7, 40):
        x = jnp.asarray(rng.standard_normal((rows, 100)), dtype)
        ids = jnp.asarray(rng.integers(-1, 6, (rows, 2)), jnp.int32)  # -1 and 5 name none
        for used in (None, jnp.asarray(rng.random(rows) < 0.7)):
            together = gated_experts_fn(CPU, used)(x, ids, gate, up, "silu")
            apart = gate_fn(CPU)(*experts_fn(CPU, used)(x, ids, gate, up), activation="silu", dtype=dtype)
            assert (bits(together) == bits(apart)).all()


def test_gates_without_such_a_kernel_are_made_of_their_products(monkeypatch: pytest.MonkeyPatch):
    weight = jnp.ones((4, 64))
    x = jnp.ones((2, 64))
    assert gated_fn(CPU)(x, weight, weight, "relu") is None
    assert gated_fn(CPU)(x, quantize(weight), quantize(weight), "silu") is None
    assert gated_fn(Numerics(implementation="reference", linear="pinned"))(x, weight, weight, "silu") is None
    monkeypatch.setattr("detspec.native.processor.has_tiles", lambda: True)
    assert gated_fn(CPU)(x, weight, weight, "silu") is None


CFG = dense_config(32, 64, 1, 2, 1, 32, 48, dtype="bfloat16")


@pytest.mark.optimised
def test_riders_that_leave_products_as_they_are_change_no_bit_of_a_gate():
    rng = np.random.default_rng(0)
    weights = {name: jnp.asarray(rng.standard_normal((48, 64)), jnp.bfloat16) for name in ("gate", "up")}
    x = jnp.asarray(rng.standard_normal((7, 64)), jnp.bfloat16)
    ops = canonical_ops(CFG, CPU)
    ridden = ops._replace(adapt_fn=lambda product: product.y_f32)
    alone = jax.jit(lambda x: ops.gated(x, "silu", **weights))(x)
    assert (bits(jax.jit(lambda x: ridden.gated(x, "silu", **weights))(x)) == bits(alone)).all()


@pytest.mark.parametrize("activation", IN_C)
def test_gates_have_the_derivative_of_the_formula(activation):
    gate, up = np.random.default_rng(0).standard_normal((2, 3, 40), np.float32)
    how = {"activation": activation, "dtype": "float32"}
    found = jax.grad(lambda *given: exact_ops(CFG, CPU).gate(*given, **how).sum(), (0, 1))(gate, up)
    expected = jax.grad(lambda *given: gated(*given, **how).sum(), (0, 1))(gate, up)
    for each, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-6)
