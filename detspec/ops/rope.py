"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in the half-split layout of Hugging Face Llama."""

import jax
import jax.numpy as jnp
import numpy as np


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Inverse wavelengths `[H/2]`, float32, worked out in float32 as transformers does."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Rotates `x [..., heads, H]` by the angles of absolute `positions [...]` (int32); float32 inside."""
    angle = positions[..., None, None].astype(jnp.float32) * frequencies.reshape((1,) * (positions.ndim + 1) + (-1,))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated_f32 = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_f32.astype(x.dtype)
