"""The decoder over whole sequences, for training; and over windows of a paged cache, for everything else."""

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.model.layers import attend_sequence, block, embed, logits_f32
from detspec.model.params import Params
from detspec.ops.rope import rope_frequencies


def forward_sequences(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Logits of whole sequences from position 0, differentiable: `tokens [B, T]` int32 -> float32 `[B, T, V]`."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    frequencies = rope_frequencies(cfg.head_dim, cfg.rope_theta)
    x = embed(params, tokens)
    for layer in params["layers"]:
        x, _ = block(layer, cfg, x, positions, frequencies, lambda q, k, v: (attend_sequence(q, k, v), None))
    return logits_f32(params, cfg, x)
