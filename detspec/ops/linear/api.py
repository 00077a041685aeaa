"""The contract of products with weights in the layout of checkpoints, and the choice of an implementation by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from detspec.errors import InputError
from detspec.ops.linear import reference, xla
from detspec.schedule import Numerics

LinearFn = Callable[[jax.Array, jax.Array], jax.Array]  # (x [..., in], weight [out, in]) -> float32 [..., out]


def linear_fn(numerics: Numerics) -> LinearFn:
    """The product that `numerics.linear` names; "pinned" runs by `numerics.implementation`.

    It takes `x [..., in]` and `weight [out, in]` of one dtype and returns `x @ weight.T`, accumulated in float32, as float32
    `[..., out]`. With "pinned", the bits of a row depend on that row, the weight and the implementation alone. They do not
    depend on the number, the order or the contents of the other rows. With "xla" they may.

    The product raises `InputError` if arguments contradict each other, or the implementation does not support them.
    """
    if numerics.linear == "xla":
        return xla.linear_f32
    return lambda x, weight: _pinned_f32(x, weight, numerics)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, linear_f32: LinearFn) -> jax.Array:
    """`linear_f32(x, weight)`, plus `bias [out]` unless it is None, cast to `x`'s dtype."""
    y_f32 = linear_f32(x, weight)
    if bias is not None:
        y_f32 += bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + bias.shape)
    return y_f32.astype(x.dtype)


def _pinned_f32(x: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
    """Checks the arguments and calls the implementation with all rows of `x` as one matrix."""
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise InputError(f"weight must be [out, in] for x [..., in], got weight {weight.shape} for x {x.shape}")
    if x.dtype != weight.dtype:
        raise InputError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    rows = x.reshape(-1, x.shape[-1])
    if numerics.implementation == "pallas_tpu":
        from detspec.ops.linear import pallas_tpu

        y_f32 = pallas_tpu.linear_f32(rows, weight, interpret=numerics.interpret)
    elif numerics.implementation == "pallas_gpu":
        from detspec.ops.linear import pallas_gpu

        y_f32 = pallas_gpu.linear_f32(rows, weight, interpret=numerics.interpret)
    elif numerics.implementation == "cpu":
        from detspec.ops.linear import cpu

        y_f32 = cpu.linear_f32(rows, weight)
    else:
        y_f32 = reference.linear_f32(rows, weight)
    return y_f32.reshape(*x.shape[:-1], -1)
