"""Attention of whole sequences over themselves, for training: in XLA's order of sums, or with the bits of attention over pages.

Both have the same derivative, that of the first.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from detspec.ops.alibi import alibi_slopes, lower_scores
from detspec.ops.attention.api import attention_and_lse, beside_sinks
from detspec.ops.attention.scores import Scores
from detspec.ops.softcap import softcap
from detspec.schedule import Numerics

# (scores, q [B, T, N, H], k [B, T, K, H], v [B, T, K, H], sinks=[N] or None) -> [B, T, N, H]
AttendSequenceFn = Callable[..., jax.Array]
QUERIES = 64  # rows of a window of queries; no bit depends on it


def attend_sequence(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, *, sinks: jax.Array | None = None, query_block: int = 128
) -> jax.Array:
    """Causal attention of whole sequences over themselves, for training: `q [B, T, N, H]`, `k, v [B, T, K, H]`.

    Queries go in blocks that meet only the keys up to their own end, so nearly half of the masked products are never made:

        query_block 2, T 4:   q 0..1 x k 0..1     q 2..3 x k 0..3

    A query attends to the last `scores.sliding_window` positions up to its own, or to all of them. Linear biases lower a head's
    capped scores by its slope times the distance. `sinks [N]` are one more score of each head.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_f32 = q.astype(jnp.float32).reshape(B, T, K, N // K, H) * np.float32(scores.scale)
    k_f32 = k.astype(jnp.float32)
    v_f32 = v.astype(jnp.float32)
    slopes = jnp.asarray(alibi_slopes(N).reshape(1, K, N // K, 1, 1))
    attended = []
    for start in range(0, T, query_block):
        end = min(start + query_block, T)
        capped = softcap(jnp.einsum("BTKQH,BSKH->BKQTS", q_f32[:, start:end], k_f32[:, :end]), scores.cap)
        distance = np.arange(start, end)[:, None] - np.arange(end)[None, :]
        if scores.alibi:
            capped = lower_scores(capped, slopes, jnp.asarray(distance, jnp.int32)[None, None, None])
        visible = (distance >= 0) & (distance < (scores.sliding_window or T))
        visible_scores = jnp.where(visible[None, None, None], capped, -jnp.inf)
        weights = jax.nn.softmax(visible_scores, axis=-1)
        found_f32 = jnp.einsum("BKQTS,BSKH->BTKQH", weights, v_f32[:, :end]).reshape(B, end - start, N, H)
        if sinks is not None:
            lse = jax.nn.logsumexp(visible_scores, axis=-1).transpose(0, 3, 1, 2).reshape(B, end - start, N)
            found_f32 = beside_sinks(found_f32, lse, sinks)
        attended.append(found_f32)
    return jnp.concatenate(attended, axis=1).astype(q.dtype)


def attend_as_pages(numerics: Numerics) -> AttendSequenceFn:
    """`attend_sequence` with the bits that `numerics` gives a query over the pages of its sequence, float32."""

    def attend(scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, *, sinks: jax.Array | None = None) -> jax.Array:
        @jax.custom_vjp
        def attended(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            return _over_pages(scores, q, k, v, sinks, numerics)

        def forward(
            q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None
        ) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
            return _over_pages(scores, q, k, v, sinks, numerics), (q, k, v, sinks)

        def ordinary(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            return attend_sequence(scores, q, k, v, sinks=sinks).astype(jnp.float32)

        def backward(given: tuple[jax.Array | None, ...], cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
            return jax.vjp(ordinary, *given)[1](cotangent)

        attended.defvjp(forward, backward)
        return attended(q, k, v, sinks)

    return attend


def _over_pages(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, numerics: Numerics
) -> jax.Array:
    """Lays keys and values `[B, T, K, H]` out as pages, each sequence's one after the other, and attends to them.

    Positions that fill up the last page come after all others, so no query of the sequence sees them.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    page = numerics.page
    rows = -(-T // math.lcm(page, QUERIES)) * math.lcm(page, QUERIES)
    to_rows = [(0, 0), (0, rows - T), (0, 0), (0, 0)]

    def pages(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(numerics.cache_dtype), [*to_rows[:3], (0, numerics.cache_head_dim(H) - H)])
        return x.reshape(B * rows // page, page, K, -1).transpose(0, 2, 1, 3)

    windows = rows // QUERIES
    tables = jnp.arange(B * rows // page, dtype=jnp.int32).reshape(B, -1)
    attended, lse = attention_and_lse(
        jnp.pad(q, to_rows).reshape(B * windows, QUERIES, N, H),
        pages(k) if numerics.key_slot_axis == 2 else pages(k).swapaxes(2, 3),
        pages(v),
        jnp.repeat(tables, windows, axis=0),
        jnp.tile(jnp.arange(rows, dtype=jnp.int32).reshape(windows, QUERIES), (B, 1)),
        scores=scores,
        numerics=numerics,
    )
    if lse is not None and sinks is not None:
        attended = beside_sinks(attended, lse, sinks)
    return attended.reshape(B, rows, N, H)[:, :T]
