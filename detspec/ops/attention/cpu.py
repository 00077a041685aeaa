"""Attention over a paged cache on CPUs, by a kernel in C that reads keys and values where they lie (`native/attention.c`).

A query head of one position meets the pages of its sequence in order, with online softmax in float32. It takes part in no sum
but its own, so neither windows, tiles nor threads change a bit of it. Up to four of them meet a page together.
"""

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import Int8Pages, Pages, numbers
from detspec.errors import InputError
from detspec.native.library import kernel
from detspec.ops.alibi import own_slopes
from detspec.ops.attention.scores import Scores
from detspec.schedule import Numerics

LANES = 16
MAX_PAGE = 512
MAX_HEAD_DIM = 512
NO_WINDOW = np.iinfo(np.int32).max


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
    """See `api.attention_and_lse`; keys are `[num_pages, K, H, page]`, pages of 16 to 512 slots, `H` at most 512."""
    G, W, N, _ = q.shape
    keys = numbers(k_pages)
    values = numbers(v_pages)
    _, _, page, H = values.shape
    if page % LANES or page > MAX_PAGE or H > MAX_HEAD_DIM:
        raise InputError(
            f'the "cpu" attention takes pages of {LANES} to {MAX_PAGE} slots and heads of at most {MAX_HEAD_DIM} dimensions, '
            f"got {page} slots and {H} dimensions"
        )
    if numerics.num_splits != 1 or numerics.block_pages != 1:
        raise InputError(
            'the "cpu" attention takes one page per step and no splits, got Numerics.block_pages '
            f"{numerics.block_pages} and Numerics.num_splits {numerics.num_splits}"
        )
    slopes = own_slopes(N) if scores.alibi else np.zeros(N, np.float32)
    # As token rows: for windows of one, XLA:CPU fused a copy of the same places with the rotation before it,
    # which took 13 us instead of 3 for 8 rows.
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((G * W, N, H), (G * W, N, 2))[: 1 + scores.lse]]
    attended, *sums = kernel("detspec_attention", values.dtype, shapes)(
        q.reshape(G * W, N, H),
        keys,
        values,
        page_tables,
        positions,
        slopes,
        *(pages.scale for pages in (k_pages, v_pages) if isinstance(pages, Int8Pages)),
        scale=np.float32(scores.scale),
        cap=np.float32(scores.cap or 0),
        sliding_window=np.int32(NO_WINDOW if scores.sliding_window is None else scores.sliding_window),
    )
    lse = [(m_and_l[..., 0] + jnp.log(m_and_l[..., 1])).reshape(G, W, N) for m_and_l in sums]
    return attended.reshape(G, W, N, H), lse[0] if lse else None
