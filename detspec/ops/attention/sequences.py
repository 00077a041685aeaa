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
SCORES = 1 << 19  # scores that are there together, 2 MiB


def attend_sequence(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, *, sinks: jax.Array | None = None, query_block: int = 128
) -> jax.Array:
    """Causal attention of whole sequences over themselves, for training: `q [B, T, N, H]`, `k, v [B, T, K, H]`.

    A few heads of keys go at a time, so that their scores stay in a cache; derivatives work out a head's scores once more.
    Queries go in blocks that meet only the keys up to their own end, so nearly half of the masked products are never made:

        query_block 2, T 4:   q 0..1 x k 0..1     q 2..3 x k 0..3

    A query attends to the last `scores.sliding_window` positions up to its own, or to all of them. Linear biases lower a head's
    capped scores by its slope times the distance. `sinks [N]` are one more score of each head.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    Q = N // K

    def heads(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).swapaxes(1, 2).reshape(B * K, -1, T, H)

    def of_each(value: jax.Array) -> jax.Array:
        return jnp.broadcast_to(value.astype(jnp.float32).reshape(1, K, Q), (B, K, Q)).reshape(B * K, Q)

    given = {"q": heads(q) * np.float32(scores.scale), "k": heads(k)[:, 0], "v": heads(v)[:, 0]}
    if scores.alibi:
        given["slopes"] = of_each(jnp.asarray(alibi_slopes(N)))
    if sinks is not None:
        given["sinks"] = of_each(sinks)
    together = max(1, SCORES // (Q * min(query_block, T) * T))
    of_head = jax.checkpoint(lambda head: _attend_head(scores, query_block=query_block, **head))
    attended = jax.lax.map(of_head, given, batch_size=min(together, B * K))
    return attended.reshape(B, N, T, H).swapaxes(1, 2).astype(q.dtype)


def _attend_head(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    query_block: int,
) -> jax.Array:
    """`attend_sequence` of scaled queries `q [Q, T, H]` that share `k, v [T, H]`, float32."""
    Q, T, H = q.shape
    attended = []
    for start in range(0, T, query_block):
        end = min(start + query_block, T)
        capped = softcap(q[:, start:end].reshape(-1, H) @ k[:end].T, scores.cap).reshape(Q, end - start, end)
        distance = np.arange(start, end)[:, None] - np.arange(end)[None, :]
        if slopes is not None:
            capped = lower_scores(capped, slopes[:, None, None], jnp.asarray(distance, jnp.int32)[None])
        visible = (distance >= 0) & (distance < (scores.sliding_window or T))
        visible_scores = jnp.where(visible[None], capped, -jnp.inf)
        weights = jax.nn.softmax(visible_scores, axis=-1)
        found = (weights.reshape(-1, end) @ v[:end]).reshape(Q, end - start, H)
        if sinks is not None:
            lse = jax.nn.logsumexp(visible_scores, axis=-1)
            found = beside_sinks(found.swapaxes(0, 1), lse.swapaxes(0, 1), sinks).swapaxes(0, 1)
        attended.append(found)
    return jnp.concatenate(attended, axis=1)


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
