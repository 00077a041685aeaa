"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in the half-split layout of Hugging Face Llama."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles of some positions, for all heads and layers of a pass."""

    cos: jax.Array  # [..., 1, H/2] float32
    sin: jax.Array  # [..., 1, H/2] float32


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Inverse wavelengths `[H/2]`, float32, worked out in float32 as transformers does."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)


def rope_rotation(positions: jax.Array, frequencies: np.ndarray) -> Rotation:
    """The rotation of absolute `positions [...]` (int32) by `frequencies [H/2]`.

    Under a condition that always holds: XLA:CPU fuses nothing through one, else every head of every layer works its cosines
    out anew, a third of a prefill's time.
    """
    angle = positions[..., None, None].astype(jnp.float32) * frequencies.reshape((1,) * (positions.ndim + 1) + (-1,))

    def rotation(angle: jax.Array) -> Rotation:
        return Rotation(jnp.cos(angle), jnp.sin(angle))

    return jax.lax.cond(jnp.any(positions >= 0), rotation, lambda angle: Rotation(angle, angle), angle)


def apply_rope(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates `x [..., heads, H]`; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation
    rotated_f32 = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_f32.astype(x.dtype)
