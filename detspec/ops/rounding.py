"""Products that are rounded before anything is added to them."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def rounded(product_f32: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`product_f32` rounded to the precision of `dtype`, which stays float32; to 22 bits for float32.

    Left alone, compilers multiply and add in one step where both are in one loop, and round in between where they are not.
    Which it is depends on the rest of a program. XLA leaves out a rounding to all 23 bits of float32, but not this one.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(product_f32, info.nexp, min(info.nmant, 22))
