"""Matrix products with weights kept as checkpoints store them: `[out, in]`."""

import jax
import jax.numpy as jnp


def linear_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` accumulated and returned in float32; `x [..., in]`, `weight [out, in]` of one dtype -> `[..., out]`."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`linear_f32` brought back to `x`'s dtype."""
    return linear_f32(x, weight).astype(x.dtype)
