"""RMSNorm and LayerNorm in float32; the caller chooses the order of their sums."""

import jax
import jax.numpy as jnp

from detspec.ops.rounding import rounded
from detspec.ops.row_sum import SumFn


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, sum_fn: SumFn, *, plus_one: bool = False) -> jax.Array:
    """`x / rms(x) * scale` over the last axis, in `x`'s dtype; `x [..., D]`, `scale [D]`; `sum_fn` sums the squares.

    With `plus_one` the factor is `1 + scale`, multiplied in float32 as in Gemma; else it is multiplied in `x`'s dtype as in
    Llama.
    """
    x_f32 = x.astype(jnp.float32)
    mean_square = sum_fn(x_f32, x_f32) / x.shape[-1]
    normed_f32 = x_f32 * jax.lax.rsqrt(mean_square + eps)[..., None]
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    if plus_one:
        return (normed_f32 * (1 + scale.astype(jnp.float32))).astype(x.dtype)
    return normed_f32.astype(x.dtype) * scale


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, eps: float, sum_fn: SumFn, plus_one: bool = False
) -> jax.Array:
    """`(x - mean) / deviation * scale + bias` over the last axis, in `x`'s dtype; `x [..., D]`, `scale, bias [D]`.

    With `plus_one` the factor is `1 + scale`. All of it is float32 inside.
    """
    x_f32 = x.astype(jnp.float32)
    centred_f32 = x_f32 - (sum_fn(x_f32) / x.shape[-1])[..., None]
    variance = sum_fn(rounded(centred_f32 * centred_f32, jnp.float32)) / x.shape[-1]
    along = (1,) * (x.ndim - 1) + scale.shape
    scale_f32 = scale.astype(jnp.float32).reshape(along)
    normed_f32 = centred_f32 * jax.lax.rsqrt(variance + eps)[..., None] * (1 + scale_f32 if plus_one else scale_f32)
    if bias is not None:
        normed_f32 = rounded(normed_f32, jnp.float32) + bias.astype(jnp.float32).reshape(along)
    return normed_f32.astype(x.dtype)
