"""Attention over a paged cache in plain jax.numpy: one page per step, online softmax, float32.

1. Queries are cut into tiles: `Q` query heads of up to `query_tile` consecutive positions of one window share their KV head's
   keys, so a tile is a `[tile * Q, H]` matrix per KV head.
2. A loop runs over KV blocks of one page, ascending from page 0, as far as the furthest query of the pass needs. A block past a
   row's position is an exact no-op for it: its scores are MASK_VALUE, `exp(MASK_VALUE - m) == 0`, the rescale factor is 1.
   With a sliding window the loop starts at the first page that any query needs. A block before a row's window is an exact
   no-op for it too: `m` stays MASK_VALUE, and its probabilities are set to 0.
3. With `num_splits > 1` (fast decode only) each split runs the loop over its own stretch of pages, and the parts are merged.

Sums over a block go through `sum_fn`, because XLA orders `sum(-1)` by the whole shape.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.errors import InputError
from detspec.ops.alibi import alibi_slopes, lower_scores
from detspec.ops.attention.splits import merge_splits
from detspec.ops.row_sum import SumFn, sum_fn
from detspec.ops.softcap import softcap
from detspec.schedule import Numerics

MASK_VALUE = -1e30  # finite, so that a fully masked block stays free of nan
MIN_TILE_ROWS = 2  # a one-row product takes another code path on the CPU, with other bits


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    cap: float | None,
    sliding_window: int | None,
    alibi: bool,
    numerics: Numerics,
) -> jax.Array:
    """See `api.paged_attention`; keys are `[num_pages, K, H, page]`."""
    if numerics.block_pages != 1:
        raise InputError(f'the "reference" attention takes one page a step, got Numerics.block_pages {numerics.block_pages}')
    G, W, N, H = q.shape
    K, page = v_pages.shape[1], v_pages.shape[2]
    Q = N // K
    # Padding looks where the furthest window does, so that no sliding window starts early for its sake.
    positions = jnp.where(positions >= 0, positions, jnp.max(positions))
    tile = max(min(W, numerics.query_tile), -(-MIN_TILE_ROWS // Q))
    padded = -(-W // tile) * tile
    tiles = padded // tile

    # [G, W, N, H] -> [X, K, tile * Q, H], X = G * tiles
    q = jnp.pad(q, ((0, 0), (0, padded - W), (0, 0), (0, 0)))
    q = q.reshape(G * tiles, tile, K, Q, H).transpose(0, 2, 1, 3, 4).reshape(G * tiles, K, tile * Q, H).astype(k_pages.dtype)
    positions = jnp.pad(positions, ((0, 0), (0, padded - W)), mode="edge")
    row_position = jnp.repeat(positions.reshape(G * tiles, tile), Q, axis=1)  # [X, tile * Q]
    page_tables = jnp.repeat(page_tables, tiles, axis=0)  # [X, max_pages]
    row_slope = jnp.asarray(np.tile(alibi_slopes(N).reshape(K, Q), (1, tile))) if alibi else None  # [K, tile * Q]

    first_block = jnp.int32(0) if sliding_window is None else jnp.maximum(jnp.min(positions) - sliding_window + 1, 0) // page
    num_blocks = jnp.max(positions) // page + 1 - first_block
    attend = partial(
        _attend_blocks,
        scale=scale,
        cap=cap,
        sliding_window=sliding_window,
        row_slope=row_slope,
        sum_fn=sum_fn(numerics),
    )
    num_splits = numerics.num_splits
    if num_splits == 1:
        first = jnp.broadcast_to(first_block, (G * tiles,))
        _, l, o = attend(q, k_pages, v_pages, page_tables, row_position, first, num_blocks)
    else:
        blocks_per_split = -(-num_blocks // num_splits)
        first = jnp.tile(first_block + jnp.arange(num_splits, dtype=jnp.int32) * blocks_per_split, G * tiles)
        q, page_tables, row_position = (jnp.repeat(x, num_splits, axis=0) for x in (q, page_tables, row_position))
        m, l, o = attend(q, k_pages, v_pages, page_tables, row_position, first, blocks_per_split)
        l, o = merge_splits(*(x.reshape(G * tiles, num_splits, *x.shape[1:]) for x in (m, l, o)))
    attended = o / l[..., None]
    attended = attended.reshape(G, tiles, K, tile, Q, H).transpose(0, 1, 3, 2, 4, 5)
    return attended.reshape(G, padded, N, H)[:, :W]


def _attend_blocks(
    q: jax.Array,  # [X, K, rows, H]
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,  # [X, max_pages]
    row_position: jax.Array,  # [X, rows]
    first_block: jax.Array,  # [X]
    num_blocks: jax.Array,
    *,
    scale: float,
    cap: float | None,
    sliding_window: int | None,
    row_slope: jax.Array | None,  # [K, rows]
    sum_fn: SumFn,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax over `num_blocks` pages from `first_block`: `m`, `l` `[X, K, rows]` and `o [X, K, rows, H]`."""
    X, K, rows, H = q.shape
    page, max_pages = v_pages.shape[2], page_tables.shape[1]
    slots = jnp.arange(page, dtype=jnp.int32)

    def attend_block(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        m_prev, l_prev, o_prev = carry
        block = first_block + step
        page_ids = jnp.take_along_axis(page_tables, jnp.minimum(block, max_pages - 1)[:, None], axis=1)[:, 0]
        k_block = k_pages.at[page_ids].get(mode="promise_in_bounds")  # [X, K, H, page]
        v_block = v_pages.at[page_ids].get(mode="promise_in_bounds")  # [X, K, page, H]
        scores = jnp.einsum("xkrh,xkhp->xkrp", q, k_block, preferred_element_type=jnp.float32) * scale
        distance = row_position[:, :, None] - ((block * page)[:, None, None] + slots[None, None, :])  # [X, rows, page]
        keep = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
        scores = softcap(scores, cap)
        if row_slope is not None:
            scores = lower_scores(scores, row_slope[None, :, :, None], distance[:, None])
        scores = jnp.where(keep[:, None], scores, MASK_VALUE)
        m_next = jnp.maximum(m_prev, scores.max(-1))
        rescale = jnp.exp(m_prev - m_next)
        p = jnp.exp(scores - m_next[..., None])
        if sliding_window is not None:
            p = jnp.where(keep[:, None], p, 0.0)
        l_next = l_prev * rescale + sum_fn(p)
        pv = jnp.einsum("xkrp,xkph->xkrh", p.astype(v_block.dtype), v_block, preferred_element_type=jnp.float32)
        return m_next, l_next, o_prev * rescale[..., None] + pv

    m = jnp.full((X, K, rows), MASK_VALUE, jnp.float32)
    carry = (m, jnp.zeros_like(m), jnp.zeros((X, K, rows, H), jnp.float32))
    return jax.lax.fori_loop(0, num_blocks, attend_block, carry)
