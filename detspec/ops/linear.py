"""Matrix products with weights kept as checkpoints store them: `[out, in]`."""

import jax
import jax.numpy as jnp

MIN_ROWS = 4  # XLA:CPU gives a one-row bf16 product a naive loop, 10 x slower than four rows and with other bits


def linear_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` accumulated and returned in float32; `x [..., in]`, `weight [out, in]` of one dtype -> `[..., out]`."""
    rows = x.size // x.shape[-1]
    if rows >= MIN_ROWS:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    padded = jnp.pad(x.reshape(rows, -1), ((0, MIN_ROWS - rows), (0, 0)))
    y = jnp.einsum("ri,oi->ro", padded, weight, preferred_element_type=jnp.float32)
    return y[:rows].reshape(*x.shape[:-1], -1)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`linear_f32`, plus `bias [out]` if there is one, brought back to `x`'s dtype."""
    y_f32 = linear_f32(x, weight)
    if bias is not None:
        y_f32 += bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + bias.shape)
    return y_f32.astype(x.dtype)
