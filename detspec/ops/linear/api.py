"""The contract of products with weights in the layout of checkpoints, and the choice of an implementation by name."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from detspec.errors import InputError
from detspec.ops.gate import IN_C, GateFn, gated
from detspec.ops.implementations import operations
from detspec.ops.linear import int8, xla
from detspec.ops.linear.int8 import QTensor
from detspec.schedule import Numerics

Matrix = jax.Array | QTensor  # a weight [out, in]
LinearFn = Callable[[jax.Array, Matrix], jax.Array]  # (x [..., in], weight [out, in]) -> float32 [..., out]
LinearsFn = Callable[..., tuple[jax.Array, ...]]  # (x [..., in], weights [out, in], ...) -> float32 [..., out], ...
# (x [..., in], gate [F, in], up [F, in], activation) -> [..., F] in the dtype of x, or None
GatedFn = Callable[..., jax.Array | None]


def linear_fn(numerics: Numerics) -> LinearFn:
    """The product that `numerics.linear` names; "pinned" runs by `numerics.implementation`.

    It takes `x [..., in]` and `weight [out, in]` of one dtype and returns `x @ weight.T`, accumulated in float32, as float32
    `[..., out]`. With "pinned", the bits of a row depend on that row, the weight and the implementation alone. They do not
    depend on the number, the order or the contents of the other rows. With "xla" they may.

    Weights in int8 have one product whatever `numerics` says, see `detspec.ops.linear.int8`: `x` is rounded to int8 by row, and
    a row's bits depend on that row and the weight alone.

    The product raises `InputError` if arguments contradict each other, or the implementation does not support them.
    """
    linears_f32 = linears_fn(numerics)
    return lambda x, weight: linears_f32(x, weight)[0]


def linears_fn(numerics: Numerics, used: jax.Array | None = None) -> LinearsFn:
    """`linear_fn` for several weights that multiply the same `x`: the same bits, with less overhead where there is some.

    `used`, bool `[R]` for an `x` of `R` rows, says whose results are used; None says that all are. The results of other rows
    may be anything finite: CPU kernels leave these rows out and give zeros.
    """

    def linears_f32(x: jax.Array, *weights: Matrix) -> tuple[jax.Array, ...]:
        rounded, floats = rounded_or_floats(weights)
        if rounded:
            return _int8_f32(x, rounded, numerics, used)
        if numerics.linear == "xla":
            return tuple(xla.linear_f32(x, weight) for weight in floats)
        return _pinned_f32(x, floats, numerics, used)

    return linears_f32


def gated_fn(numerics: Numerics, used: jax.Array | None = None) -> GatedFn:
    """`activation(x @ gate.T) * (x @ up.T)` in the dtype of `x`, if one kernel has products and gate; else None.

    Bits are those of `linears_fn` and `gate_fn`, and `used` is as there; but the products take no way through memory.
    """
    found = operations(numerics)

    def gated_rows(x: jax.Array, gate: Matrix, up: Matrix, activation: str) -> jax.Array | None:
        rounded, floats = rounded_or_floats((gate, up))
        if found.gated_linears is None or rounded or numerics.linear == "xla" or activation not in IN_C:
            return None
        _check_floats(x, floats)
        rows = found.gated_linears(x.reshape(-1, x.shape[-1]), *floats, activation, used)
        return rows.reshape(*x.shape[:-1], rows.shape[-1])

    return gated_rows


def gate_fn(numerics: Numerics) -> GateFn:
    """`gated` by the implementation that `numerics` names; a number's bits depend on the two that it is made of alone."""
    return operations(numerics).gated or gated


def rounded_or_floats(weights: Sequence[Matrix]) -> tuple[list[QTensor], list[jax.Array]]:
    """Weights that multiply the same `x`, those in int8 and those in floats. Raises `InputError` if there are both."""
    rounded = [weight for weight in weights if isinstance(weight, QTensor)]
    floats = [weight for weight in weights if not isinstance(weight, QTensor)]
    if rounded and floats:
        raise InputError("weights that multiply the same x must be all in int8 or all in floats, got both")
    return rounded, floats


def biased(y_f32: jax.Array, bias: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """`y_f32 [..., out]` plus `bias [out]`, unless it is None, cast to `dtype`."""
    if bias is not None:
        y_f32 += bias.astype(jnp.float32).reshape((1,) * (y_f32.ndim - 1) + bias.shape)
    return y_f32.astype(dtype)


def _pinned_f32(
    x: jax.Array, weights: Sequence[jax.Array], numerics: Numerics, used: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Checks the arguments and calls the implementation with all rows of `x` as one matrix."""
    _check_floats(x, weights)
    rows = x.reshape(-1, x.shape[-1])
    found = operations(numerics).linears_f32(rows, weights, used)
    return tuple(y_f32.reshape(*x.shape[:-1], y_f32.shape[-1]) for y_f32 in found)


def _int8_f32(x: jax.Array, weights: Sequence[QTensor], numerics: Numerics, used: jax.Array | None) -> tuple[jax.Array, ...]:
    """Multiplies by weights in int8: by a kernel on the CPU, where XLA's products of integers are slow, elsewhere by XLA."""
    for weight in weights:
        _check_shapes(x, weight.values)
    int8.check_inputs(x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    found = operations(numerics).int8_linears_f32(rows, weights, used)
    return tuple(y_f32.reshape(*x.shape[:-1], y_f32.shape[-1]) for y_f32 in found)


def _check_floats(x: jax.Array, weights: Sequence[jax.Array]) -> None:
    for weight in weights:
        _check_shapes(x, weight)
        if x.dtype != weight.dtype:
            raise InputError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")


def _check_shapes(x: jax.Array, weight: jax.Array) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise InputError(f"weight must be [out, in] for x [..., in], got weight {weight.shape} for x {x.shape}")
