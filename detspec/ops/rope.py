"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with pairs half a head apart or next to each other."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import RopeScaling


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles of a pass's positions, shared by all heads and layers."""

    cos: jax.Array  # [..., 1, H/2] float32
    sin: jax.Array  # [..., 1, H/2] float32


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Inverse wavelengths `[H/2]`, float32, computed in float32 as in transformers."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)
    if scaling is None:
        return frequencies
    if scaling.kind == "longrope":
        return frequencies / np.asarray(scaling.factors, np.float32)
    stretched = frequencies / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "llama3":
        kept = _kept_by_wavelength(frequencies, scaling)
    else:
        kept = _kept_by_dimension(head_dim, theta, scaling)
    return ((1 - kept) * stretched + kept * frequencies).astype(np.float32)


def _kept_by_wavelength(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: 1 for wavelengths short against the original length, 0 for long ones, linear in between."""
    fits = np.float32(scaling.original_max_position) * frequencies / np.float32(2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return np.clip((fits - np.float32(scaling.low_freq_factor)) / np.float32(span), 0, 1)


def _kept_by_dimension(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN: 1 for dimensions of at least `beta_fast` turns in the original length, 0 for at most `beta_slow`, else linear."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    span = high - low or 0.001
    return 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)


def rope_rotation(positions: jax.Array, frequencies: np.ndarray, attention_factor: float = 1.0) -> Rotation:
    """The rotation of absolute `positions [...]` (int32) by `frequencies [H/2]`, multiplied by `attention_factor`.

    They are worked out once: otherwise every head of every layer would recompute its cosines, which takes a third of a prefill
    on a CPU. A condition that always holds keeps XLA:CPU from fusing them into what reads them, a barrier the other compilers,
    whose devices may wait for the host at a condition.
    """
    angle = positions[..., None, None].astype(jnp.float32) * frequencies.reshape((1,) * (positions.ndim + 1) + (-1,))

    def rotation(angle: jax.Array) -> Rotation:
        return Rotation(jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor)

    def conditional(angle: jax.Array) -> Rotation:
        return jax.lax.cond(jnp.any(positions >= 0), rotation, lambda angle: Rotation(angle, angle), angle)

    def held_apart(angle: jax.Array) -> Rotation:
        return jax.lax.optimization_barrier(rotation(angle))

    return jax.lax.platform_dependent(angle, cpu=conditional, default=held_apart)


def apply_rope(x: jax.Array, rotation: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Rotates the first `2 * cos.shape[-1]` places of each head of `x [..., heads, H]`; float32 inside.

    Pairs that are neighbours (`interleaved`) come out half the rotated places apart: queries and keys are ordered alike, so no
    score is another one.
    """
    cos, sin = rotation
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        turned = apply_rope(x[..., :size], rotation, interleaved=interleaved)
        return jnp.concatenate([turned, x[..., size:]], axis=-1)
    x_f32 = x.astype(jnp.float32)
    first, second = (x_f32[..., ::2], x_f32[..., 1::2]) if interleaved else jnp.split(x_f32, 2, axis=-1)
    rotated_f32 = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_f32.astype(x.dtype)
