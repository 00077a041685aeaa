"""The thinker and the compressor: over whole sequences for training, over windows of a canonical pass for generation.

The thinker T reads the stream of a chunk and says a thought. The compressor C turns it into the states of the next chunk.

C = 4, M = 4, a thought of three tokens:

    T    reads  h0 h1 h2 h3 z1 z2 -        h: the chunk's stream after `out_layer` layers, z: embedded tokens of the thought
         says            z1 z2 end         each at the place before it
    C    reads  z1 z2 end end              filled up with the ending token to C places
         gives  s0 s1 s2 s3                the last C places; all exactly 0 for a trivial thought
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from detspec.cache import KV, init_cache
from detspec.config import ModelConfig, ThinkingConfig
from detspec.errors import InputError
from detspec.model.attention import Attention
from detspec.model.layers import Layer, capped, run_layer, scale_embeddings
from detspec.model.params import Params
from detspec.model.places import Where, place
from detspec.model.rows import RowOps, canonical_ops, training_ops
from detspec.model.transformer import forward_sequences, lookup
from detspec.ops import collectives
from detspec.ops.row_sum import first_largest
from detspec.schedule import Numerics
from detspec.state import Injected, Windows
from detspec.thinking.thoughts import cut_after_end, is_trivial, padded_thoughts, thought_length


def thinking_of(cfg: ModelConfig) -> ThinkingConfig:
    """How the model thinks; `InputError` if it does not."""
    if cfg.thinking is None:
        raise InputError(
            "the model has no thinker and no compressor: train one that thinks (`detspec train --config "
            "configs/thinking_parity.py`), or give a backbone untrained ones with `detspec.model.params.with_thinking`"
        )
    return cfg.thinking


def compress_sequences(params: Params, cfg: ModelConfig, thoughts: jax.Array) -> jax.Array:
    """States of given thoughts, differentiable in the parameters: `thoughts [X, M]` int32 -> `[X, C, D]`."""
    tokens = _compressor_tokens(cfg, thoughts)
    x = scale_embeddings(cfg, params["embed"][tokens])
    x = _whole(cfg, _own_layer(cfg, 0), params["thinking"]["compressor"]["layer"], x)
    return _states(cfg, x, thoughts)


def think_sequences(params: Params, cfg: ModelConfig, tapped: jax.Array, thoughts: jax.Array) -> jax.Array:
    """Logits of the thinker at every place of given thoughts, differentiable.

    Args:
        tapped: `[X, C, D]`, the stream of each chunk after `out_layer` layers.
        thoughts: `[X, M]` int32, what it said before each place.

    Returns:
        Logits of the tokens of the thought, float32 `[X, M, V]`.
    """
    C = thinking_of(cfg).chunk
    M = thoughts.shape[1]
    said = scale_embeddings(cfg, params["embed"][jnp.maximum(thoughts[:, : M - 1], 0)])
    x = jnp.concatenate([tapped, said], axis=1)
    thinker = params["thinking"]["thinker"]
    x = _whole(cfg, _own_layer(cfg, -1), thinker["layer"], x)
    return _thought_logits(thinker, cfg, x[:, C - 1 :], training_ops(cfg))


def compress(params: Params, cfg: ModelConfig, thoughts: jax.Array, *, numerics: Numerics) -> jax.Array:
    """States of the thoughts of a canonical pass: `thoughts [G, M]` int32 -> `[G, C, D]`."""
    tokens = _compressor_tokens(cfg, thoughts)
    G, P = tokens.shape
    desk = _Desk(cfg, _own_layer(cfg, 0), numerics, num_sequences=G, length=P)
    x = scale_embeddings(cfg, lookup(params["embed"], tokens.reshape(-1), numerics=numerics))
    x, _ = desk.read(params["thinking"]["compressor"]["layer"], x, tokens, 0, desk.empty)
    return _states(cfg, x.reshape(G, P, -1), thoughts)


def compress_if_any(
    params: Params, cfg: ModelConfig, thoughts: jax.Array, wanted: jax.Array, *, numerics: Numerics
) -> jax.Array:
    """States `[G, C, D]` of `thoughts [G, M]`, if one that is `wanted [G]` is not trivial; they are 0 else."""
    thinking = thinking_of(cfg)
    shape = (thoughts.shape[0], thinking.chunk, cfg.d_model)
    return jax.lax.cond(
        jnp.any(wanted & ~is_trivial(thoughts, thinking.end_id)),
        lambda: compress(params, cfg, thoughts, numerics=numerics),
        lambda: jnp.zeros(shape, cfg.jax_dtype),
    )


def think(
    params: Params,
    cfg: ModelConfig,
    tapped: jax.Array,
    drafted: jax.Array,
    wanted_fn: Callable[[jax.Array], jax.Array],
    *,
    numerics: Numerics,
) -> jax.Array:
    """The thoughts after the chunks of a canonical pass.

    The thinker reads all drafted tokens at once, and what it says becomes the next draft, until nothing changes: at most one
    round more than there are wrong tokens. Every round has one shape, so a thought does not depend on its draft.

        draft 5 9 0     says 5 7 3     right up to 7      draft 5 7 3     says 5 7 0     right up to its end

    Args:
        tapped: `[G, C, D]`, the stream of each chunk after `out_layer` layers.
        drafted: `[G, M]` int32.
        wanted_fn: maps rejected drafts to the chunks that still need a complete thought, both `[G]` bool. The output for
            other chunks is unspecified.

    Returns:
        `[G, M]` int32. A thought that has no end within `M` tokens is cut there.
    """
    thinking = thinking_of(cfg)
    G, C, D = tapped.shape
    M = drafted.shape[1]
    end_id = thinking.end_id
    thinker = params["thinking"]["thinker"]
    ops = canonical_ops(cfg, numerics)
    desk = _Desk(cfg, _own_layer(cfg, -1), numerics, num_sequences=G, length=C + M - 1)
    x, pages = desk.read(thinker["layer"], tapped.reshape(-1, D), jnp.zeros((G, C), jnp.int32), 0, desk.empty)
    first = first_largest(_thought_logits(thinker, cfg, x.reshape(G, C, D)[:, -1], ops))

    def say(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, _ = carry
        said = jnp.maximum(tokens[:, : M - 1], 0)
        x = scale_embeddings(cfg, lookup(params["embed"], said.reshape(-1), numerics=numerics))
        x, _ = desk.read(thinker["layer"], x, said, C, pages)
        targets = first_largest(_thought_logits(thinker, cfg, x, ops)).reshape(G, M - 1)
        return _agreed(tokens, jnp.concatenate([first[:, None], targets], axis=1))

    def unfinished(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, known = carry
        place = jnp.arange(M, dtype=jnp.int32)[None, :]
        is_known = place < known[:, None]
        ended = ((tokens == end_id) & is_known).any(1) | (known == M)
        rejected = ((cut_after_end(tokens, end_id) != drafted) & is_known).any(1)
        return jnp.any(wanted_fn(rejected) & ~ended)

    carry = jnp.concatenate([first[:, None], drafted[:, 1:]], axis=1), _all(G, 1)
    if M > 1:
        carry = jax.lax.while_loop(unfinished, say, carry)
    return cut_after_end(carry[0], end_id)


def _agreed(tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`tokens [G, M]` replaced by `targets` from the first that differs on, and how many of them are known now, `[G]`."""
    agrees = jnp.cumprod((tokens == targets).astype(jnp.int32), axis=1)
    known = jnp.minimum(agrees.sum(1, dtype=jnp.int32) + 1, tokens.shape[1])
    return jnp.where(agrees == 1, tokens, targets), known


def _compressor_tokens(cfg: ModelConfig, thoughts: jax.Array) -> jax.Array:
    thinking = thinking_of(cfg)
    return padded_thoughts(thoughts, max(thinking.chunk, thoughts.shape[-1]), thinking.end_id)


def _states(cfg: ModelConfig, x: jax.Array, thoughts: jax.Array) -> jax.Array:
    """The last `C` places of `x [X, P, D]` up to the end of each thought or place `C`, whichever is later; 0 if trivial."""
    thinking = thinking_of(cfg)
    C = thinking.chunk
    first = jnp.maximum(thought_length(thoughts), C) - C
    places = first[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
    states = jnp.take_along_axis(x, places[:, :, None], axis=1)
    return jnp.where(is_trivial(thoughts, thinking.end_id)[:, None, None], jnp.zeros_like(states), states)


def _thought_logits(thinker: Params, cfg: ModelConfig, x: jax.Array, ops: RowOps) -> jax.Array:
    own_f32 = ops.linear_f32(ops.normed(x, thinker, "final_norm"), head=thinker["head"])
    return capped(cfg, collectives.gather(own_f32))


def _own_layer(cfg: ModelConfig, index: int) -> Layer:
    """Layer `index` as the compressor or the thinker runs it: over all positions, with the heads of this chip."""
    layer: Layer = cfg.layer(index)
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    own_heads = {name: getattr(mixer, name) // collectives.kv_chips() for name in ("num_heads", "num_kv_heads")}
    return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, window=None, **own_heads))


def _whole(cfg: ModelConfig, layer: Layer, params: Params, x: jax.Array) -> jax.Array:
    """`layer` over whole sequences `x [X, T, D]`, differentiable."""
    ops = training_ops(cfg)
    prepared = layer.mixer.prepare(jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2]))
    return run_layer(layer, params, x, lambda normed: (layer.mixer.whole(params, normed, prepared, ops), None), ops, ops)[0]


class _Desk:
    """A layer over windows of sequences of its own, in pages that are thrown away afterwards."""

    def __init__(self, cfg: ModelConfig, layer: Layer, numerics: Numerics, *, num_sequences: int, length: int) -> None:
        alone = dataclasses.replace(cfg, kinds=(layer,), pattern=(0,), thinking=None)
        self._cache = init_cache(alone, max_requests=num_sequences, max_len=length, numerics=numerics)
        self._layer = layer
        self._numerics = numerics
        self._ops = canonical_ops(cfg, numerics)
        self.empty: KV = self._cache.pools[0]

    def read(self, params: Params, x: jax.Array, tokens: jax.Array, start: int, pages: KV) -> tuple[jax.Array, KV]:
        """The layer over `x [G * W, D]` at positions from `start` on, of `tokens [G, W]`, and the pages with them."""
        G, W = tokens.shape
        windows = Windows(tokens=tokens, sequence=jnp.arange(G, dtype=jnp.int32), start=_all(G, start), count=_all(G, W))
        places = place(windows, self._cache, self._numerics.page)
        where = Where(windows, places, self._layer.mixer.prepare(windows.positions.reshape(-1)), self._numerics)

        def mix(normed: jax.Array) -> tuple[jax.Array, KV]:
            return self._layer.mixer.windows(params, normed, where, pages, self._ops, self._ops)

        return run_layer(self._layer, params, x, mix, self._ops, self._ops)


_all = partial(jnp.full, dtype=jnp.int32)


def forward_taught(params: Params, cfg: ModelConfig, tokens: jax.Array, thoughts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits of the text and of the thoughts, in one differentiable pass (Thinking States, section 4).

    Args:
        tokens: `[B, T]` int32, from position 0.
        thoughts: `[B, X, M]` int32, the thought after chunk `i` of `X = T // C`; all NO_TOKEN where there is none.

    Returns:
        Logits of the tokens that follow, float32 `[B, T, V]`, and of the thoughts' tokens, float32 `[B, X, M, V]`.
    """
    thinking = thinking_of(cfg)
    B, T = tokens.shape
    _, X, M = thoughts.shape
    C = thinking.chunk
    states = compress_sequences(params, cfg, thoughts.reshape(B * X, M)).reshape(B, X * C, -1)
    inject = jnp.pad(states, ((0, 0), (C, C), (0, 0)))[:, :T]
    logits, tapped = forward_sequences(
        params, cfg, tokens, inject=Injected(thinking.in_layer, inject), tap_layer=thinking.out_layer
    )
    assert tapped is not None
    chunks = tapped[:, : X * C].reshape(B * X, C, -1)
    return logits, think_sequences(params, cfg, chunks, thoughts.reshape(B * X, M)).reshape(B, X, M, -1)
