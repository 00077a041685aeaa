"""Soft capping (Gemma 2, arXiv 2408.00118, section 2): values squashed smoothly into a range."""

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, of any shape, in `x`'s dtype; `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
