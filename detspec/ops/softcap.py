"""Soft capping (Gemma 2, arXiv 2408.00118, section 2): squashes values smoothly into a range."""

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)` for `x` of any shape, in its dtype; `x` itself if `cap` is None.

    The bounds change no value. They stand between the product and a following sum, which compilers would join in some programs.
    """
    return x if cap is None else jnp.clip(cap * jnp.tanh(x / cap), -cap, cap)
