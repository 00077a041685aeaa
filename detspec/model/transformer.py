"""The decoder over windows of a paged cache, for generation; and over whole sequences, for training."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import SCRATCH_PAGE, KVCache, append
from detspec.config import ModelConfig
from detspec.model.layers import RowOps, attend_sequence, block, layer_rotations, logits_f32, row_ops, scale_embeddings
from detspec.model.params import Params
from detspec.ops.attention.api import NO_POSITION, paged_attention
from detspec.ops.attention.scores import Scores
from detspec.ops.linear import xla
from detspec.ops.linear.api import linear_fn
from detspec.ops.rope import Rotation
from detspec.ops.row_sum import native_sum, sum_fn
from detspec.schedule import Numerics
from detspec.state import Windows


class Pass(NamedTuple):
    """What one pass over windows gives."""

    logits_f32: jax.Array  # [G, W, V]
    cache: KVCache  # with the windows' keys and values
    tapped: jax.Array | None  # [G, W, D], the stream where it was asked for


def forward(
    params: Params,
    cfg: ModelConfig,
    windows: Windows,
    cache: KVCache,
    *,
    numerics: Numerics,
    inject: jax.Array | None = None,
    tap_layer: int | None = None,
) -> Pass:
    """One pass over `G * W` token rows: writes their keys and values, then attends, layer by layer.

    Because a layer writes before it attends, several windows of one pass may hold consecutive stretches of one sequence.
    Padding writes to the scratch page. `cache.length` is left as it is: committing is the caller's.

    Args:
        params, cfg: the model.
        windows: what to feed; `tokens [G, W]`.
        cache: pages and page table that the windows' rows refer to.
        schedule: fixes the order of the floating-point operations.
        inject: `[G, W, D]`, added to the stream when it has been through `cfg.thinking.in_layer` layers.
        tap_layer: how many layers the stream has been through where it is wanted; nowhere if None.
    """
    G, W = windows.tokens.shape
    places = place(windows, cache)
    rotations = layer_rotations(cfg, windows.positions.reshape(-1))
    ops = row_ops(cfg, sum_fn(numerics), linear_fn(numerics))

    x = scale_embeddings(cfg, lookup(params["embed"], windows.tokens.reshape(-1)))  # [R, D]
    k_pools, v_pools, tapped = [], [], None
    for index, layer in enumerate(params["layers"]):
        x, tapped = _between_layers(cfg, x, tapped, index, inject, tap_layer)
        with jax.named_scope(f"layer_{index}"):
            x, pages = paged_block(
                *(layer, cfg, x, rotations[index], (cache.k[index], cache.v[index]), places, ops),
                sliding_window=cfg.sliding_window_of(index),
                numerics=numerics,
            )
        k_pools.append(pages[0])
        v_pools.append(pages[1])
    x, tapped = _between_layers(cfg, x, tapped, cfg.num_layers, inject, tap_layer)
    return Pass(
        logits_f32=logits_f32(params, cfg, x, ops).reshape(G, W, -1),
        cache=cache.replace(k=tuple(k_pools), v=tuple(v_pools)),
        tapped=None if tapped is None else tapped.reshape(G, W, -1),
    )


def _between_layers(
    cfg: ModelConfig, x: jax.Array, tapped: jax.Array | None, depth: int, inject: jax.Array | None, tap_layer: int | None
) -> tuple[jax.Array, jax.Array | None]:
    """The stream `x [..., D]` after `depth` layers with what is injected there, and what is tapped there or was before."""
    if inject is not None and cfg.thinking is not None and depth == cfg.thinking.in_layer:
        x = x + inject.reshape(x.shape).astype(x.dtype)
    return x, x if depth == tap_layer else tapped


class Places(NamedTuple):
    """Where the token rows of a pass lie in a cache."""

    tables: jax.Array  # [G, max_pages] int32, pages of each window's sequence
    page_ids: jax.Array  # [R] int32, page of each row, SCRATCH_PAGE for padding
    slots: jax.Array  # [R] int32, slot in it
    looking_from: jax.Array  # [G, W] int32, positions, NO_POSITION in windows that pad the pass


def place(windows: Windows, cache: KVCache) -> Places:
    """The places of `windows` in `cache`."""
    page, max_pages = cache.page, cache.page_table.shape[1]
    positions = windows.positions
    tables = jnp.where(windows.row[:, None] >= 0, cache.page_table[jnp.maximum(windows.row, 0)], SCRATCH_PAGE)
    pages = jnp.take_along_axis(tables, jnp.minimum(positions // page, max_pages - 1), axis=1)
    return Places(
        tables=tables,
        page_ids=jnp.where(windows.used, pages, SCRATCH_PAGE).reshape(-1),
        slots=(positions % page).reshape(-1),
        looking_from=jnp.where(windows.row[:, None] >= 0, positions, NO_POSITION),
    )


def paged_block(
    layer: dict[str, jax.Array],
    cfg: ModelConfig,
    x: jax.Array,
    rotation: Rotation | None,
    pages: tuple[jax.Array, jax.Array],
    places: Places,
    ops: RowOps,
    *,
    sliding_window: int | None,
    numerics: Numerics,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer over token rows `x [R, D]` at `places` of its `pages` (keys, values): the rows after it, and the pages."""
    G, W = places.looking_from.shape

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        # A token whose keys or values are not finite breaks whoever attends to it, and nobody else: nan keys are masked
        # with their scores, but nan values would reach rows that mask them, as `0 * nan`.
        sound = (jnp.isfinite(k) & jnp.isfinite(v)).all((1, 2))[:, None, None]
        k, v = jnp.where(sound, k, jnp.nan), jnp.where(sound, v, jnp.zeros_like(v))
        k_pages = append(pages[0], k, places.page_ids, places.slots, slot_axis=numerics.key_slot_axis)
        v_pages = append(pages[1], v, places.page_ids, places.slots)
        q = q.reshape(G, W, cfg.num_heads, cfg.head_dim)
        scores = Scores(cfg.score_scale, cfg.attn_softcap, sliding_window, cfg.position_encoding == "alibi")
        attended = paged_attention(q, k_pages, v_pages, places.tables, places.looking_from, scores=scores, numerics=numerics)
        return attended.reshape(G * W, cfg.num_heads, cfg.head_dim), (k_pages, v_pages)

    return block(layer, cfg, x, rotation, attend, ops)


def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
    """`table[rows]`; on the CPU by bit pattern where it has two-byte elements.

    XLA:CPU converts a whole bf16 table to look up one row; for a TPU, taking it by bit pattern copies the whole table.
    """

    def by_pattern(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[rows], table.dtype)

    def plainly(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table[rows]

    if table.dtype.itemsize != 2:
        return plainly(table, rows)
    return jax.lax.platform_dependent(table, rows, cpu=by_pattern, default=plainly)


def forward_sequences(
    params: Params, cfg: ModelConfig, tokens: jax.Array, *, inject: jax.Array | None = None, tap_layer: int | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of whole sequences from position 0, differentiable; `inject [B, T, D]` and `tap_layer` as in `forward`.

    Returns:
        For `tokens [B, T]` int32, float32 `[B, T, V]`, and the stream `[B, T, D]` where it was asked for.
    """
    B, T = tokens.shape
    rotations = layer_rotations(cfg, jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)))
    ops = training_ops(cfg)
    x, tapped = scale_embeddings(cfg, params["embed"][tokens]), None
    for index, layer in enumerate(params["layers"]):
        x, tapped = _between_layers(cfg, x, tapped, index, inject, tap_layer)
        x = sequence_block(layer, cfg, x, rotations[index], ops, sliding_window=cfg.sliding_window_of(index))
    x, tapped = _between_layers(cfg, x, tapped, cfg.num_layers, inject, tap_layer)
    return logits_f32(params, cfg, x, ops), tapped


def training_ops(cfg: ModelConfig) -> RowOps:
    """Operations on single rows in XLA's own order of additions."""
    return row_ops(cfg, native_sum, xla.linear_f32)


def sequence_block(
    layer: dict[str, jax.Array],
    cfg: ModelConfig,
    x: jax.Array,
    rotation: Rotation | None,
    ops: RowOps,
    *,
    sliding_window: int | None = None,
) -> jax.Array:
    """One layer over whole sequences `x [B, T, D]`."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        attended = attend_sequence(
            *(q, k, v),
            scale=cfg.score_scale,
            cap=cfg.attn_softcap,
            sliding_window=sliding_window,
            alibi=cfg.position_encoding == "alibi",
        )
        return attended, None

    return block(layer, cfg, x, rotation, attend, ops)[0]
