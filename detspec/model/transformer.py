"""The decoder over windows of a paged cache, for generation; and over whole sequences, for training."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import SCRATCH_PAGE, KVCache, Pages
from detspec.config import ModelConfig
from detspec.model.layers import (
    AttendFn,
    RowOps,
    attend_sequence,
    block,
    head_f32,
    logits_f32,
    rotations_of,
    row_ops,
    scale_embeddings,
)
from detspec.model.params import Params
from detspec.ops import collectives
from detspec.ops.attention.api import NO_POSITION, append_fn, paged_attention
from detspec.ops.attention.scores import Scores
from detspec.ops.linear.api import linears_fn
from detspec.ops.row_sum import native_sum, sum_fn
from detspec.schedule import Numerics
from detspec.state import Windows


class Pass(NamedTuple):
    """What one pass over windows gives; rows that pad it or are not wanted hold nothing of use."""

    logits_f32: jax.Array  # [R, V]; on chips this one's share of the rows, see `collectives.to_rows`
    cache: KVCache  # with the windows' keys and values
    tapped: jax.Array | None  # [G, W, D], the stream after `tap_layer` layers


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
    Padding writes to the scratch page. `cache.length` is left as it is: the caller commits.

    Args:
        windows: what to feed; `tokens [G, W]`. Rows that are not `wanted` leave keys and values, and give nothing of use.
        cache: pages, and the page table that the windows' sequences refer to.
        numerics: fixes the order of the floating-point operations.
        inject: `[G, W, D]`, added to the stream after `cfg.thinking.in_layer` layers.
        tap_layer: the number of layers after which the stream is wanted; nowhere if None.
    """
    G, W = windows.tokens.shape
    places = place(windows, cache)
    rotations = rotations_of(cfg, windows.positions.reshape(-1))
    ops = last_ops = canonical_ops(cfg, numerics, windows.used)
    last_places = places
    if windows.wanted is not None:  # the last layer may do no more for the others than their keys and values
        last_ops = canonical_ops(cfg, numerics, windows.wanted)
        last_places = places.for_windows(windows.wanted.any(1))

    x = scale_embeddings(cfg, lookup(params["embed"], windows.tokens.reshape(-1), numerics=numerics))  # [R, D]
    k_pools = []
    v_pools = []
    streams = []  # after 0, 1, ... layers
    for index, layer in enumerate(params["layers"]):
        x = inject_at(index, cfg, x, inject)
        streams.append(x)
        pages = cache.k[index], cache.v[index]
        window = cfg.sliding_window_of(index)
        is_last = index == cfg.num_layers - 1
        with jax.named_scope(f"layer_{index}"):
            seen_from = last_places if is_last else places
            attend_fn = paged_attend(cfg, pages, seen_from, sliding_window=window, numerics=numerics)
            x, pages = block(layer, cfg, x, rotations[index], attend_fn, ops, last_ops if is_last else ops)
        k_pools.append(pages[0])
        v_pools.append(pages[1])
    streams.append(x)
    return Pass(
        logits_f32=logits_f32(params, cfg, x, last_ops),
        cache=cache.replace(k=tuple(k_pools), v=tuple(v_pools)),
        tapped=None if tap_layer is None else streams[tap_layer].reshape(G, W, -1),
    )


def logits_fn(
    params: Params, cfg: ModelConfig, windows: Windows, stream: jax.Array, *, numerics: Numerics
) -> Callable[[], jax.Array]:
    """What works out the logits `[R, V]` of a pass over `windows` from the stream `[G, W, D]` after its last layer; see `Pass`.

    The last norm is worked out at once, in the program of the pass: XLA does not round what it hands from one to the other.
    """
    ops = canonical_ops(cfg, numerics, windows.used if windows.wanted is None else windows.wanted)
    normed = ops.norm(stream.reshape(-1, stream.shape[-1]), params["final_norm"])
    return lambda: head_f32(params, cfg, normed, ops)


def canonical_ops(cfg: ModelConfig, numerics: Numerics, used: jax.Array | None = None) -> RowOps:
    """Operations on single rows in the order of `numerics`; `used [G, W]` are the rows that matter, see `linears_fn`."""
    return row_ops(cfg, sum_fn(numerics), linears_fn(numerics, None if used is None else used.reshape(-1)))


def inject_at(depth: int, cfg: ModelConfig, x: jax.Array, inject: jax.Array | None) -> jax.Array:
    """The stream `x [..., D]` after `depth` layers, plus `inject` if that is where thoughts go in."""
    if inject is None or cfg.thinking is None or depth != cfg.thinking.in_layer:
        return x
    return x + inject.reshape(x.shape).astype(x.dtype)


class Places(NamedTuple):
    """Where the token rows of a pass lie in a cache."""

    tables: jax.Array  # [G, max_pages] int32, pages of each window's sequence
    page_ids: jax.Array  # [R] int32, page of each row, SCRATCH_PAGE for padding
    slots: jax.Array  # [R] int32, slot in it
    looking_from: jax.Array  # [G, W] int32, positions, NO_POSITION in windows that need no attention

    def for_windows(self, wanted: jax.Array) -> "Places":
        """The same places, where only windows `wanted [G]` need attention."""
        return self._replace(looking_from=jnp.where(wanted[:, None], self.looking_from, NO_POSITION))


def place(windows: Windows, cache: KVCache) -> Places:
    """The places of `windows` in `cache`."""
    page = cache.page
    max_pages = cache.page_table.shape[1]
    positions = windows.positions
    in_use = windows.sequence[:, None] >= 0
    tables = jnp.where(in_use, cache.page_table[jnp.maximum(windows.sequence, 0)], SCRATCH_PAGE)
    pages = jnp.take_along_axis(tables, jnp.minimum(positions // page, max_pages - 1), axis=1)
    return Places(
        tables=tables,
        page_ids=jnp.where(windows.used, pages, SCRATCH_PAGE).reshape(-1),
        slots=(positions % page).reshape(-1),
        looking_from=jnp.where(windows.count[:, None] > 0, positions, NO_POSITION),
    )


def paged_attend(
    cfg: ModelConfig, pages: tuple[Pages, Pages], places: Places, *, sliding_window: int | None, numerics: Numerics
) -> AttendFn:
    """Attention of token rows `[R]` at `places` over one layer's `pages` (keys, values); threads on the written pages."""
    G, W = places.looking_from.shape
    write = append_fn(numerics)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[Pages, Pages]]:
        # A token whose keys or values are not finite breaks the tokens that attend to it, and no other: nan keys are masked
        # with their scores, but nan values would reach tokens that mask them, as `0 * nan`.
        sound = (jnp.isfinite(k) & jnp.isfinite(v)).all((1, 2))[:, None, None]
        k = jnp.where(sound, k, jnp.nan)
        v = jnp.where(sound, v, jnp.zeros_like(v))
        k_pages = write(pages[0], k, places.page_ids, places.slots, slot_axis=numerics.key_slot_axis)
        v_pages = write(pages[1], v, places.page_ids, places.slots)
        attended = paged_attention(
            q.reshape(G, W, -1, cfg.head_dim),
            k_pages,
            v_pages,
            places.tables,
            places.looking_from,
            scores=Scores(cfg.score_scale, cfg.attn_softcap, sliding_window, cfg.position_encoding == "alibi"),
            numerics=numerics,
        )
        return attended.reshape(G * W, -1, cfg.head_dim), (k_pages, v_pages)

    return attend


def lookup(table: jax.Array, rows: jax.Array, *, numerics: Numerics) -> jax.Array:
    """`table[rows]` for `rows [R]`, of a `table [V, D]` that chips may share: each has `V/n` rows of it."""
    size = table.shape[0]
    place = rows - collectives.chip() * size
    if collectives.num_chips() == 1:
        return _take(table, rows, numerics=numerics)
    found = _take(table, jnp.clip(place, 0, size - 1), numerics=numerics)
    return collectives.select(found, (place >= 0) & (place < size))


def _take(table: jax.Array, rows: jax.Array, *, numerics: Numerics) -> jax.Array:
    """`table[rows]` for `rows [R]`; on the CPU by a kernel, or by bit pattern where it has two-byte elements.

    XLA:CPU converts a whole bf16 table to look up one row, and copies it once a program to look it up by bit pattern. For a
    TPU, that copies the whole table, too.
    """
    if numerics.implementation == "cpu":
        from detspec.ops import moves

        return moves.take(table, rows)

    def by_pattern(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[rows], table.dtype)

    if table.dtype.itemsize != 2:
        return table[rows]
    return jax.lax.platform_dependent(table, rows, cpu=by_pattern, default=lambda table, rows: table[rows])


def forward_sequences(
    params: Params, cfg: ModelConfig, tokens: jax.Array, *, inject: jax.Array | None = None, tap_layer: int | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of whole sequences from position 0, differentiable; `inject [B, T, D]` and `tap_layer` as in `forward`.

    Returns:
        For `tokens [B, T]` int32, float32 `[B, T, V]`, and the stream `[B, T, D]` after `tap_layer` layers.
    """
    B, T = tokens.shape
    rotations = rotations_of(cfg, jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)))
    ops = training_ops(cfg)
    x = scale_embeddings(cfg, params["embed"][tokens])
    streams = []
    for index, layer in enumerate(params["layers"]):
        x = inject_at(index, cfg, x, inject)
        streams.append(x)
        x, _ = block(layer, cfg, x, rotations[index], sequence_attend(cfg, cfg.sliding_window_of(index)), ops)
    streams.append(x)
    return logits_f32(params, cfg, x, ops), None if tap_layer is None else streams[tap_layer]


def training_ops(cfg: ModelConfig) -> RowOps:
    """Operations on single rows in XLA's own order of additions."""
    return row_ops(cfg, native_sum, linears_fn(Numerics(linear="xla")))


def sequence_attend(cfg: ModelConfig, sliding_window: int | None = None) -> AttendFn:
    """Attention of whole sequences over themselves; threads nothing on."""
    return lambda q, k, v: (attend_sequence(cfg, q, k, v, sliding_window=sliding_window), None)
