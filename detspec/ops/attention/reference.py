"""Attention over a paged cache in plain jax.numpy: one page per step, online softmax, float32.

1. Queries are cut into tiles: `Q` query heads of up to `query_tile` consecutive positions of one window share their KV head's
   keys, so a tile is a `[tile * Q, H]` matrix per KV head.
2. A loop runs over KV blocks of one page, ascending from page 0 to the last page that a query of the pass needs. A block past
   a row's position is an exact no-op for it: its scores are MASK_VALUE, `exp(MASK_VALUE - m) == 0`, the rescale factor is 1.
   With a sliding window the loop starts at the first page that any query needs. A block before a row's window is an exact
   no-op, too: `m` stays MASK_VALUE, and its probabilities are set to 0.
3. With `num_splits > 1` (fast decode only) each split loops over its own range of pages, and the parts are merged.

Sums over a block use `sum_fn`, because XLA chooses the order of `sum(-1)` by the whole shape.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import Int8Pages, Pages, numbers
from detspec.errors import InputError
from detspec.ops.alibi import lower_scores, own_slopes
from detspec.ops.attention.scores import Scores
from detspec.ops.row_sum import SumFn, sum_fn
from detspec.ops.softcap import softcap
from detspec.schedule import Numerics

MASK_VALUE = -1e30  # finite, so that a fully masked block has no nan
MIN_TILE_ROWS = 2  # a one-row product takes another code path on many CPUs, with other bits


class Tiles(NamedTuple):
    """Tiles of queries, and where each looks."""

    q: jax.Array  # [X, K, rows, H]
    page_tables: jax.Array  # [X, max_pages]
    row_position: jax.Array  # [X, rows]


def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scores: Scores,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array | None]:
    """See `api.attention_and_lse`; keys are `[num_pages, K, H, page]`."""
    if numerics.block_pages != 1:
        raise InputError(f'the "reference" attention takes one page per step, got Numerics.block_pages {numerics.block_pages}')
    G, W, N, H = q.shape
    K, page = numbers(v_pages).shape[1:3]
    Q = N // K
    # Padding takes the furthest position, so that it never makes a sliding window start early, and position 0 in a pass of
    # nothing else, as the sum of no page would be divided by 0.
    positions = jnp.where(positions >= 0, positions, jnp.maximum(jnp.max(positions), 0))
    tile = max(min(W, numerics.query_tile), -(-MIN_TILE_ROWS // Q))
    padded = -(-W // tile) * tile
    tiles = padded // tile

    # [G, W, N, H] -> [X, K, tile * Q, H], X = G * tiles
    q = jnp.pad(q, ((0, 0), (0, padded - W), (0, 0), (0, 0)))
    q = q.reshape(G * tiles, tile, K, Q, H).transpose(0, 2, 1, 3, 4).reshape(G * tiles, K, tile * Q, H)
    q = q if isinstance(k_pages, Int8Pages) else q.astype(k_pages.dtype)
    positions = jnp.pad(positions, ((0, 0), (0, padded - W)), mode="edge")
    row_position = jnp.repeat(positions.reshape(G * tiles, tile), Q, axis=1)  # [X, tile * Q]
    queries = Tiles(q, jnp.repeat(page_tables, tiles, axis=0), row_position)
    row_slope = jnp.tile(own_slopes(N).reshape(K, Q), (1, tile)) if scores.alibi else None  # [K, tile * Q]

    sliding_window = scores.sliding_window
    first_block = jnp.int32(0) if sliding_window is None else jnp.maximum(jnp.min(positions) - sliding_window + 1, 0) // page
    num_blocks = jnp.max(positions) // page + 1 - first_block
    attend = partial(_attend_blocks, scores=scores, row_slope=row_slope, sum_fn=sum_fn(numerics))
    num_splits = numerics.num_splits
    if num_splits == 1:
        first = jnp.broadcast_to(first_block, (G * tiles,))
        m, l, o = attend(queries, (k_pages, v_pages), first, num_blocks)
    else:
        blocks_per_split = -(-num_blocks // num_splits)
        first = jnp.tile(first_block + jnp.arange(num_splits, dtype=jnp.int32) * blocks_per_split, G * tiles)
        queries = Tiles(*(jnp.repeat(x, num_splits, axis=0) for x in queries))
        m, l, o = attend(queries, (k_pages, v_pages), first, blocks_per_split)
        m, l, o = merge_splits(*(x.reshape(G * tiles, num_splits, *x.shape[1:]) for x in (m, l, o)))

    def by_position(x: jax.Array) -> jax.Array:
        by_tile = x.reshape(G, tiles, K, tile, Q, -1).transpose(0, 1, 3, 2, 4, 5)
        return by_tile.reshape(G, padded, N, -1)[:, :W]

    return by_position(o / l[..., None]), by_position(m + jnp.log(l))[..., 0] if scores.lse else None


def _attend_blocks(
    queries: Tiles,
    pages: tuple[Pages, Pages],  # keys, values
    first_block: jax.Array,  # [X]
    num_blocks: jax.Array,
    *,
    scores: Scores,
    row_slope: jax.Array | None,  # [K, rows]
    sum_fn: SumFn,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax over `num_blocks` pages from `first_block`: `m`, `l` `[X, K, rows]` and `o [X, K, rows, H]`."""
    q, page_tables, row_position = queries
    k_pages, v_pages = pages
    X, K, rows, H = q.shape
    page = numbers(v_pages).shape[2]
    max_pages = page_tables.shape[1]
    sliding_window = scores.sliding_window
    slots = jnp.arange(page, dtype=jnp.int32)

    def attend_block(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        m_prev, l_prev, o_prev = carry
        block = first_block + step
        page_ids = jnp.take_along_axis(page_tables, jnp.minimum(block, max_pages - 1)[:, None], axis=1)[:, 0]
        k_block, k_scale = _block(k_pages, page_ids, q.dtype)  # [X, K, H, page], [X, K, page]
        v_block, v_scale = _block(v_pages, page_ids, q.dtype)  # [X, K, page, H], [X, K, page]
        score = jnp.einsum("xkrh,xkhp->xkrp", q, k_block, preferred_element_type=jnp.float32)
        if k_scale is not None:
            score = score * k_scale[:, :, None]
        score = score * scores.scale
        distance = row_position[:, :, None] - ((block * page)[:, None, None] + slots[None, None, :])  # [X, rows, page]
        keep = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
        score = softcap(score, scores.cap)
        if row_slope is not None:
            score = lower_scores(score, row_slope[None, :, :, None], distance[:, None])
        score = jnp.where(keep[:, None], score, MASK_VALUE)
        m_next = jnp.maximum(m_prev, score.max(-1))
        rescale = jnp.exp(m_prev - m_next)
        p = jnp.exp(score - m_next[..., None])
        if sliding_window is not None:
            p = jnp.where(keep[:, None], p, 0.0)
        l_next = l_prev * rescale + sum_fn(p)
        if v_scale is not None:
            p = p * v_scale[:, :, None]
        pv = jnp.einsum("xkrp,xkph->xkrh", p.astype(v_block.dtype), v_block, preferred_element_type=jnp.float32)
        return m_next, l_next, o_prev * rescale[..., None] + pv

    m = jnp.full((X, K, rows), MASK_VALUE, jnp.float32)
    carry = (m, jnp.zeros_like(m), jnp.zeros((X, K, rows, H), jnp.float32))
    return jax.lax.fori_loop(0, num_blocks, attend_block, carry)


def _block(pages: Pages, page_ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Pages `page_ids [X]`, and the scales of their slots; numbers in int8 as the same numbers of `dtype`."""
    block = numbers(pages).at[page_ids].get(mode="promise_in_bounds")
    if not isinstance(pages, Int8Pages):
        return block, None
    return block.astype(dtype), pages.scale.at[page_ids].get(mode="promise_in_bounds")


def merge_splits(m: jax.Array, l: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the online softmax of parts, `m, l [X, splits, K, rows]` and `o [X, splits, K, rows, H]`, into that of the whole.

    A part without keys to attend to gets weight 0, as long as another part has some.
    """
    top = m.max(1, keepdims=True)
    weight = jnp.exp(m - top)
    return top[:, 0], (l * weight).sum(1), (o * weight[..., None]).sum(1)
