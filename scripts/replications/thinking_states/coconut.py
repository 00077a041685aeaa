"""Reading with continuous thoughts (Coconut, arXiv 2412.06769): the last hidden state is the next input, several times.

    prompt            latents                      rest
    Who is ... BOT    h(BOT)  h(latent 0)  ...     EOT  A :  answer
       |               ^                            |
       one pass        a loop: each input is        one pass, which attends to both
                       the output before it

Rows have prompts and numbers of latents of their own. What a row lacks is masked, and positions count only what is there.
Gradients run through the loop (backpropagation through time).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.model.attention import AttendFn, Attention
from detspec.model.layers import logits_f32, run_layer, scale_embeddings
from detspec.model.params import Params
from detspec.model.rows import training_ops
from detspec.ops.alibi import alibi_slopes, lower_scores


class LatentRows(NamedTuple):
    """Rows to read, as int32 arrays; PAD_ID where a row has ended. `K` is the most latents of a row."""

    prompt: jax.Array | np.ndarray  # [B, P]
    has_token: jax.Array | np.ndarray  # [B, P] bool, True where `prompt` holds a token
    has_latent: jax.Array | np.ndarray  # [B, K] bool, True for the latents of a row, which come first
    rest: jax.Array | np.ndarray  # [B, T], what follows the latents


class _Keys(NamedTuple):
    """Keys of a layer, and their positions."""

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H]
    positions: jax.Array  # [B, S] int32
    there: jax.Array  # [B, S] bool


def forward_latent(params: Params, cfg: ModelConfig, rows: LatentRows) -> jax.Array:
    """Logits of `rows.rest`, float32 `[B, T, V]`, read after the prompts and the latents; differentiable through both.

    `cfg` has no sliding layers. A row's latents are as many as `rows.has_latent` counts, possibly 0.
    """
    ops = training_ops(cfg)
    prompt, has_token, has_latent, rest = map(jnp.asarray, rows)
    length = has_token.sum(1, dtype=jnp.int32)
    num_latents = has_latent.sum(1, dtype=jnp.int32)

    x, seen = _read(params, cfg, _embed(params, cfg, prompt), _count(prompt, jnp.zeros_like(length)), has_token, [])
    if has_latent.shape[1]:
        last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)
        seen = _think(params, cfg, ops.norm(last, params["final_norm"]), length, has_latent, seen)
    there = jnp.ones(rest.shape, bool)
    x, _ = _read(params, cfg, _embed(params, cfg, rest), _count(rest, length + num_latents), there, seen)
    return logits_f32(params, cfg, x, ops)


def _think(
    params: Params, cfg: ModelConfig, first: jax.Array, start: jax.Array, has_latent: jax.Array, seen: list[_Keys]
) -> list[_Keys]:
    """`seen` and the latents, one for each column of `has_latent`; the first input is `first [B, 1, D]`."""
    mixer = cfg.layer(0).mixer
    ops = training_ops(cfg)
    B, K = has_latent.shape
    positions = _count(has_latent, start)
    empty = jnp.zeros((B, K, mixer.num_kv_heads, mixer.head_dim), first.dtype)
    room = [(empty, empty)] * cfg.num_layers

    def step(carry: tuple[jax.Array, list[tuple[jax.Array, jax.Array]]], place: jax.Array):  # type: ignore[no-untyped-def]
        h, room = carry
        before = has_latent & (jnp.arange(K, dtype=jnp.int32) < place)[None, :]
        known = [_join(keys, _Keys(k, v, positions, before)) for keys, (k, v) in zip(seen, room, strict=True)]
        own = jnp.take_along_axis(positions, place[None, None], axis=1)
        x, after = _read(params, cfg, h, own, jnp.ones((B, 1), bool), known)
        put = lambda array, new: jax.lax.dynamic_update_slice(array, new[:, -1:], (0, place, 0, 0))  # noqa: E731
        room = [(put(k, keys.k), put(v, keys.v)) for (k, v), keys in zip(room, after, strict=True)]
        return (ops.norm(x, params["final_norm"]), room), None

    (_, room), _ = jax.lax.scan(step, (first, room), jnp.arange(K, dtype=jnp.int32))
    return [_join(keys, _Keys(k, v, positions, has_latent)) for keys, (k, v) in zip(seen, room, strict=True)]


def _read(
    params: Params, cfg: ModelConfig, x: jax.Array, positions: jax.Array, there: jax.Array, seen: list[_Keys]
) -> tuple[jax.Array, list[_Keys]]:
    """The stream after all layers over `x [B, T, D]` at `positions`, after what was `seen` in each layer, and both joined."""
    ops = training_ops(cfg)
    after = []
    for index, layer_params in enumerate(params["layers"]):
        layer = cfg.layer(index)
        attend_fn = _attend(layer.mixer, positions, there, seen[index] if seen else None)
        mix = partial(layer.mixer.attend_with, layer_params)
        rotation = layer.mixer.prepare(positions)
        x, keys = run_layer(layer, layer_params, x, lambda h: mix(h, rotation, attend_fn, ops, ops), ops, ops)  # noqa: B023
        after.append(keys)
    return x, after


def _attend(mixer: Attention, positions: jax.Array, there: jax.Array, seen: _Keys | None) -> AttendFn:
    """Causal attention by positions, to what was `seen` and to the new tokens themselves; threads both on."""
    slopes = alibi_slopes(mixer.num_heads).reshape(1, mixer.num_kv_heads, -1, 1, 1)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, _Keys]:
        keys = _Keys(k, v, positions, there)
        if seen is not None:
            keys = _join(seen, keys)
        B, T, N, H = q.shape
        K = keys.k.shape[2]
        scores = jnp.einsum("BTKQH,BSKH->BKQTS", q.reshape(B, T, K, N // K, H) * np.float32(mixer.scores.scale), keys.k)
        distance = (positions[:, :, None] - keys.positions[:, None, :])[:, None, None]
        if mixer.positions == "alibi":
            scores = lower_scores(scores, jnp.asarray(slopes), distance)
        visible = (distance >= 0) & keys.there[:, None, None, None, :]
        # Padding sees nothing: a finite mask keeps its rows, and their gradients, finite.
        weights = jax.nn.softmax(jnp.where(visible, scores, jnp.float32(-1e30)), axis=-1)
        return jnp.einsum("BKQTS,BSKH->BTKQH", weights, keys.v).reshape(B, T, N, H), keys

    return attend


def _join(first: _Keys, second: _Keys) -> _Keys:
    return _Keys(*(jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


def _count(like: jax.Array, start: jax.Array) -> jax.Array:
    """Positions `[B, T]` int32 of `like [B, T]`, from `start [B]` on."""
    return start[:, None] + jnp.arange(like.shape[1], dtype=jnp.int32)[None, :]


def _embed(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    return scale_embeddings(cfg, params["embed"][tokens])
