"""The contract of products with weights in the layout of checkpoints, and the choice of an implementation by name."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from detspec.errors import InputError
from detspec.ops.linear import reference, xla
from detspec.schedule import Numerics

LinearFn = Callable[[jax.Array, jax.Array], jax.Array]  # (x [..., in], weight [out, in]) -> float32 [..., out]
LinearsFn = Callable[..., tuple[jax.Array, ...]]  # (x [..., in], weights [out, in], ...) -> float32 [..., out], ...


def linear_fn(numerics: Numerics) -> LinearFn:
    """The product that `numerics.linear` names; "pinned" runs by `numerics.implementation`.

    It takes `x [..., in]` and `weight [out, in]` of one dtype and returns `x @ weight.T`, accumulated in float32, as float32
    `[..., out]`. With "pinned", the bits of a row depend on that row, the weight and the implementation alone. They do not
    depend on the number, the order or the contents of the other rows. With "xla" they may.

    The product raises `InputError` if arguments contradict each other, or the implementation does not support them.
    """
    linears_f32 = linears_fn(numerics)
    return lambda x, weight: linears_f32(x, weight)[0]


def linears_fn(numerics: Numerics) -> LinearsFn:
    """`linear_fn` for several weights that multiply the same `x`: the same bits, with less overhead where there is some."""
    if numerics.linear == "xla":
        return lambda x, *weights: tuple(xla.linear_f32(x, weight) for weight in weights)
    return lambda x, *weights: _pinned_f32(x, weights, numerics)


def biased(y_f32: jax.Array, bias: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """`y_f32 [..., out]` plus `bias [out]`, unless it is None, cast to `dtype`."""
    if bias is not None:
        y_f32 += bias.astype(jnp.float32).reshape((1,) * (y_f32.ndim - 1) + bias.shape)
    return y_f32.astype(dtype)


def _pinned_f32(x: jax.Array, weights: Sequence[jax.Array], numerics: Numerics) -> tuple[jax.Array, ...]:
    """Checks the arguments and calls the implementation with all rows of `x` as one matrix."""
    for weight in weights:
        if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
            raise InputError(f"weight must be [out, in] for x [..., in], got weight {weight.shape} for x {x.shape}")
        if x.dtype != weight.dtype:
            raise InputError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    rows = x.reshape(-1, x.shape[-1])
    if numerics.implementation == "pallas_tpu":
        from detspec.ops.linear import pallas_tpu

        found = [pallas_tpu.linear_f32(rows, weight, interpret=numerics.interpret) for weight in weights]
    elif numerics.implementation == "pallas_gpu":
        from detspec.ops.linear import pallas_gpu

        found = [pallas_gpu.linear_f32(rows, weight, interpret=numerics.interpret) for weight in weights]
    elif numerics.implementation == "cpu":
        from detspec.ops.linear import cpu

        found = cpu.linears_f32(rows, weights)
    else:
        found = [reference.linear_f32(rows, weight) for weight in weights]
    return tuple(y_f32.reshape(*x.shape[:-1], -1) for y_f32 in found)
