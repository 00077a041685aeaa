"""RMSNorm in float32; the caller chooses the order of its sums."""

import jax
import jax.numpy as jnp

from detspec.ops.row_sum import SumFn


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, sum_fn: SumFn, *, plus_one: bool = False) -> jax.Array:
    """`x / rms(x) * scale` over the last axis, in `x`'s dtype; `x [..., D]`, `scale [D]`; `sum_fn` sums the squares.

    With `plus_one` the factor is `1 + scale`, multiplied in float32 as in Gemma; else it is multiplied in `x`'s dtype as in
    Llama.
    """
    x_f32 = x.astype(jnp.float32)
    mean_square = sum_fn(x_f32 * x_f32) / x.shape[-1]
    normed_f32 = x_f32 * jax.lax.rsqrt(mean_square + eps)[..., None]
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    if plus_one:
        return (normed_f32 * (1 + scale.astype(jnp.float32))).astype(x.dtype)
    return normed_f32.astype(x.dtype) * scale
