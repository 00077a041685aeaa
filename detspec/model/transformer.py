"""The decoder over windows of a paged cache, for generation; and over whole sequences, for training."""

import jax
import jax.numpy as jnp

from detspec.cache import SCRATCH_PAGE, KVCache, append
from detspec.config import ModelConfig, Schedule
from detspec.model.layers import attend_sequence, block, layer_rotations, logits_f32, row_ops, scale_embeddings
from detspec.model.params import Params
from detspec.ops.attention.api import NO_POSITION, paged_attention
from detspec.ops.linear import xla
from detspec.ops.linear.api import linear_fn
from detspec.ops.row_sum import native_sum, sum_fn
from detspec.state import Windows


def forward(
    params: Params, cfg: ModelConfig, windows: Windows, cache: KVCache, *, schedule: Schedule
) -> tuple[jax.Array, KVCache]:
    """One pass over `G * W` token rows: writes their keys and values, then attends, layer by layer.

    Because a layer writes before it attends, several windows of one pass may hold consecutive stretches of one sequence.
    Padding writes to the scratch page. `cache.length` is left as it is: committing is the caller's.

    Args:
        params, cfg: the model.
        windows: what to feed; `tokens [G, W]`.
        cache: pages and page table that the windows' rows refer to.
        schedule: fixes the order of the floating-point operations.

    Returns:
        Logits float32 `[G, W, V]` and the cache with the new keys and values.
    """
    G, W = windows.tokens.shape
    page, max_pages = cache.page, cache.page_table.shape[1]
    positions, used = windows.positions, windows.used
    tables = jnp.where(windows.row[:, None] >= 0, cache.page_table[jnp.maximum(windows.row, 0)], SCRATCH_PAGE)
    pages = jnp.take_along_axis(tables, jnp.minimum(positions // page, max_pages - 1), axis=1)
    page_ids = jnp.where(used, pages, SCRATCH_PAGE).reshape(-1)
    slots = (positions % page).reshape(-1)
    looking_from = jnp.where(windows.row[:, None] >= 0, positions, NO_POSITION)
    rotations = layer_rotations(cfg, positions.reshape(-1))
    ops = row_ops(cfg, sum_fn(schedule), linear_fn(schedule))

    x = scale_embeddings(cfg, lookup(params["embed"], windows.tokens.reshape(-1)))  # [R, D]
    k_pools, v_pools = [], []
    for index, layer in enumerate(params["layers"]):

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: int = index
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            # A token whose keys or values are not finite breaks whoever attends to it, and nobody else: nan keys are masked
            # with their scores, but nan values would reach rows that mask them, as `0 * nan`.
            sound = (jnp.isfinite(k) & jnp.isfinite(v)).all((1, 2))[:, None, None]
            k, v = jnp.where(sound, k, jnp.nan), jnp.where(sound, v, jnp.zeros_like(v))
            k_pages = append(cache.k[layer], k, page_ids, slots, slot_axis=schedule.key_slot_axis)
            v_pages = append(cache.v[layer], v, page_ids, slots)
            q = q.reshape(G, W, cfg.num_heads, cfg.head_dim)
            attended = paged_attention(
                *(q, k_pages, v_pages, tables, looking_from),
                scale=cfg.score_scale,
                cap=cfg.attn_softcap,
                sliding_window=cfg.window_of(layer),
                schedule=schedule,
            )
            return attended.reshape(G * W, cfg.num_heads, cfg.head_dim), (k_pages, v_pages)

        with jax.named_scope(f"layer_{index}"):
            x, (k_pages, v_pages) = block(layer, cfg, x, rotations[index], attend, ops)
        k_pools.append(k_pages)
        v_pools.append(v_pages)
    return logits_f32(params, cfg, x, ops).reshape(G, W, -1), cache.replace(k=tuple(k_pools), v=tuple(v_pools))


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


def forward_sequences(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Logits of whole sequences from position 0, differentiable: `tokens [B, T]` int32 -> float32 `[B, T, V]`."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rotations = layer_rotations(cfg, positions)
    ops = row_ops(cfg, native_sum, xla.linear_f32)
    x = scale_embeddings(cfg, params["embed"][tokens])
    for index, layer in enumerate(params["layers"]):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: int = index) -> tuple[jax.Array, None]:
            window = cfg.window_of(layer)
            return attend_sequence(q, k, v, scale=cfg.score_scale, cap=cfg.attn_softcap, sliding_window=window), None

        x, _ = block(layer, cfg, x, rotations[index], attend, ops)
    return logits_f32(params, cfg, x, ops)
