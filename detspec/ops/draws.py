"""Tokens drawn from logits on CPUs, by a kernel in C that passes over what cannot be drawn (`native/sample.c`).

Most tokens could not win with the largest noise there is, so noise is worked out for few. Logarithms are the kernel's own:
now and then a token differs from the one that `sampler.draw` gives.
"""

import jax
import jax.numpy as jnp

from detspec.native.library import kernel
from detspec.state import SamplingArrays


def draw(logits_f32: jax.Array, position: jax.Array, rows: SamplingArrays, *, cache_dtype: str) -> jax.Array:
    """See `sampler.draw`; `logits_f32 [R, V]` -> `[R]` int32. The kernels for `cache_dtype` have it."""
    call = kernel("detspec_draw", cache_dtype, jax.ShapeDtypeStruct(logits_f32.shape[:1], jnp.int32))
    numbers = (rows.temperature, rows.top_p, rows.min_p, rows.top_k, rows.seed.astype(jnp.int32), position)
    return call(logits_f32, *numbers)
