"""Training through time, which Thinking States avoid: each state is the previous chunk's own stream.

    chunk 0    ->  stream after `out_layer` layers  ->  chunk 1, added after `in_layer` layers  ->  its stream  ->  chunk 2 ...

Every chunk waits for the previous one, forwards and backwards, as in training with continuous thoughts (Coconut, arXiv
2412.06769). Keys and values of earlier chunks are kept, so no chunk is computed twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.model.attention import AttendFn, Attention
from detspec.model.layers import logits_f32, run_layer, scale_embeddings
from detspec.model.params import Params
from detspec.model.rows import training_ops
from detspec.ops.alibi import alibi_slopes, lower_scores
from detspec.thinking.blocks import thinking_of


def forward_unrolled(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Logits `[B, T, V]` float32 of `tokens [B, T]` int32, read chunk after chunk; differentiable, also through the states.

    `T` is a multiple of the chunk; the loop is unrolled in the program.
    """
    thinking = thinking_of(cfg)
    ops = training_ops(cfg)
    B, T = tokens.shape
    state = jnp.zeros((B, thinking.chunk, cfg.d_model), cfg.jax_dtype)
    seen: list[tuple[jax.Array, jax.Array] | None] = [None] * cfg.num_layers
    logits = []
    for start in range(0, T, thinking.chunk):
        positions = start + jnp.broadcast_to(jnp.arange(thinking.chunk, dtype=jnp.int32), (B, thinking.chunk))
        x = scale_embeddings(cfg, params["embed"][tokens[:, start : start + thinking.chunk]])
        for index, layer_params in enumerate(params["layers"]):
            if index == thinking.in_layer:
                x = x + state
            layer = cfg.layer(index)
            attend_fn = _attend_after(layer.mixer, seen[index])
            mix = partial(layer.mixer.attend_with, layer_params)
            rotation = layer.mixer.prepare(positions)
            x, seen[index] = run_layer(layer, layer_params, x, lambda h: mix(h, rotation, attend_fn, ops, ops), ops, ops)  # noqa: B023
            if index + 1 == thinking.out_layer:
                state = x
        logits.append(logits_f32(params, cfg, x, ops))
    return jnp.concatenate(logits, axis=1)


def _attend_after(mixer: Attention, seen: tuple[jax.Array, jax.Array] | None) -> AttendFn:
    """Causal attention of a chunk to itself and to the keys and values `seen [B, S, K, H]` of all earlier chunks."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        if seen is not None:
            k = jnp.concatenate([seen[0], k], axis=1)
            v = jnp.concatenate([seen[1], v], axis=1)
        (B, C, N, H) = q.shape
        (S, K) = k.shape[1:3]
        grouped = q.reshape(B, C, K, N // K, H) * np.float32(mixer.scores.scale)
        scores = jnp.einsum("BTKQH,BSKH->BKQTS", grouped, k)
        distance = np.arange(S - C, S)[:, None] - np.arange(S)[None, :]
        if mixer.positions == "alibi":
            slopes = jnp.asarray(alibi_slopes(N).reshape(1, K, N // K, 1, 1))
            scores = lower_scores(scores, slopes, jnp.asarray(distance, jnp.int32)[None, None, None])
        weights = jax.nn.softmax(jnp.where(jnp.asarray(distance >= 0)[None, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("BKQTS,BSKH->BTKQH", weights, v).reshape(B, C, N, H), (k, v)

    return attend
