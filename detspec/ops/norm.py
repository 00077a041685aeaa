"""RMSNorm in float32, one schedule per row."""

import jax
import jax.numpy as jnp

from detspec.ops.row_sum import SumFn


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, sum_fn: SumFn) -> jax.Array:
    """`x / rms(x) * scale` over the last axis; `x [..., D]`, `scale [D]`, in `x`'s dtype; summed by `sum_fn`."""
    x_f32 = x.astype(jnp.float32)
    mean_square = sum_fn(x_f32 * x_f32) / x.shape[-1]
    normed_f32 = x_f32 * jax.lax.rsqrt(mean_square + eps)[..., None]
    return normed_f32.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
