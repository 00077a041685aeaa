"""Products with weights as XLA compiles them: the order of sums may change with the number of rows."""

import jax
import jax.numpy as jnp

MIN_ROWS = 4  # XLA:CPU runs a one-row bf16 product as a naive loop, 10 x slower than four rows and with other bits


def linear_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` accumulated and returned in float32; `x [..., in]`, `weight [out, in]` of one dtype -> `[..., out]`."""
    rows = x.size // x.shape[-1]
    if rows >= MIN_ROWS:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    padded = jnp.pad(x.reshape(rows, -1), ((0, MIN_ROWS - rows), (0, 0)))
    y = jnp.einsum("ri,oi->ro", padded, weight, preferred_element_type=jnp.float32)
    return y[:rows].reshape(*x.shape[:-1], -1)
