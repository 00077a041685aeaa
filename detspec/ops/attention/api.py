"""The contract of attention over a paged cache, and the choice of its implementation by name."""

import jax

from detspec.config import Schedule
from detspec.ops.attention import reference
from detspec.ops.row_sum import sum_fn

MASK_VALUE = reference.MASK_VALUE


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    cap: float | None = None,
    sliding_window: int | None = None,
    schedule: Schedule,
) -> jax.Array:
    """Causal attention of `G` windows of `W` queries, each over its own sequence in the cache.

    A query at absolute position `p` attends to positions `0 .. p` of its window's sequence, all already written, or with
    a sliding window to the last `sliding_window` of these. Its bits
    depend on those keys and values, on itself and on `schedule` (page, splits, implementation), never on other windows, on
    stale slots with finite contents, on the number of pages a neighbour needs, or on where pages lie.

    Args:
        q: `[G, W, N, H]`, in the activations' dtype.
        k_pages: `[num_pages, K, H, page]`, in the cache's dtype.
        v_pages: `[num_pages, K, page, H]`, in the cache's dtype.
        page_tables: `[G, max_pages]` int32, each window's pages in order.
        positions: `[G, W]` int32.
        scale: factor of the scores.
        cap: scores are squashed into `+-cap`, see `softcap`; None leaves them.
        sliding_window: positions that a query attends to, its own included; None is all.
        schedule: its `query_tile`, `num_splits`, `reductions` and `implementation`; `G` and `W` are those of `q`.

    Returns:
        `[G, W, N, H]` float32.
    """
    return reference.paged_attention(
        *(q, k_pages, v_pages, page_tables, positions),
        query_tile=schedule.query_tile,
        num_splits=schedule.num_splits,
        scale=scale,
        cap=cap,
        sliding_window=sliding_window,
        sum_fn=sum_fn(schedule),
    )
