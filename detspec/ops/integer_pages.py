"""Attention of integer models over pages of keys and values of 8 bits, in XLA.

A slot has `mantissa + 2**16 * exponent` of its token and head. Attention looks at a block of pages twice: first for the largest
score and exponent, then for the sums, which may be added up in any order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from detspec.cache import Int8Pages, append
from detspec.integer.spec import FRACTION, LIMIT, Activations, Cached
from detspec.ops import integer
from detspec.ops.integer import I32, NO_SCORE, U32

BLOCK = 256  # positions that a step of attention looks at


def appended(pages: Any, x: jax.Array, row: Activations, page_ids: jax.Array, slots: jax.Array) -> Int8Pages:
    """`pages` with keys or values `x [R, K, H]`, which stand for `x * row.mantissa * 2**row.exponent`, at places `[R]`."""
    new = integer.cached(x, row)
    scale = (new.exponent << 16) | new.mantissa
    return Int8Pages(
        values=append(pages.values, new.values, page_ids, slots),
        scale=append(pages.scale[..., None], scale[..., None], page_ids, slots)[..., 0],
    )


def attended(
    q: Activations, pools: Any, tables: jax.Array, positions: jax.Array, *, score: tuple[int, int], window: int | None
) -> jax.Array:
    """Attention of queries `[G * W, N, H]` at `positions [G, W]` over pages by `tables [G, max_pages]`: fixed `[G * W, N, H]`.

    `score` is the mantissa and the exponent of what scores are multiplied with; see `spec.attended`.
    """
    G, W = positions.shape
    page = pools.k.values.shape[2]
    K = pools.k.values.shape[1]
    H = pools.k.values.shape[3]
    max_pages = tables.shape[1]
    at_once = min(max(1, BLOCK // page), max_pages)
    tables = jnp.pad(tables, ((0, 0), (0, -max_pages % at_once)))
    score_mantissa, score_exponent = score

    def by_head(x: jax.Array) -> jax.Array:  # [R, N, ...] -> [G, K, Q * W, ...]
        x = x.reshape(G, W, K, -1, *x.shape[2:])
        return jnp.moveaxis(x, 1, 3).reshape(G, K, -1, *x.shape[4:])

    high, low = (by_head(part) for part in integer.split(q.values))
    of_query = by_head(integer.rounded_shift(q.mantissa * score_mantissa, 15))
    exponent = by_head(q.exponent + score_exponent)
    Q = high.shape[2] // W
    looking_from = jnp.tile(positions, (1, Q))[:, None, :, None]  # [G, 1, Q * W, 1]

    def block_of(pages: Any, step: jax.Array) -> Cached:
        ids = lax.dynamic_slice_in_dim(tables, step * at_once, at_once, axis=1)
        values = jnp.moveaxis(pages.values[ids], 2, 1).reshape(G, K, at_once * page, H)
        scale = jnp.moveaxis(pages.scale[ids], 2, 1).reshape(G, K, 1, at_once * page)
        return Cached(values, scale & 0xFFFF, scale >> 16)

    def visible_at(step: jax.Array) -> jax.Array:
        place = step * (at_once * page) + jnp.arange(at_once * page, dtype=I32)[None, None, None, :]
        visible = place <= looking_from
        return visible if window is None else visible & (place > looking_from - window)

    def scores(step: jax.Array, keys: Cached) -> jax.Array:
        total = (_each(high, keys.values, 3, 3) << 8) + _each(low, keys.values, 3, 3)
        mantissa = integer.rounded_shift(of_query[..., None] * keys.mantissa, 15)
        score = integer.scaled(total, mantissa, -(exponent[..., None] + keys.exponent + 30 + FRACTION))
        return jnp.where(visible_at(step), score, NO_SCORE)

    def look(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, highest, is_bad = carry
        keys = block_of(pools.k, step)
        values = block_of(pools.v, step)
        visible = visible_at(step)
        lost = integer.is_lost(keys.exponent) | integer.is_lost(values.exponent)
        return (
            jnp.maximum(largest, scores(step, keys).max(-1)),
            jnp.maximum(highest, jnp.where(visible, values.exponent, NO_SCORE).max(-1)),
            is_bad | (visible & lost).any(-1),
        )

    def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        of_all, of_high, of_low = carry
        keys = block_of(pools.k, step)
        values = block_of(pools.v, step)
        visible = visible_at(step)
        a, shift = integer.power(jnp.maximum(largest[..., None] - scores(step, keys), 0))
        p = jnp.where(visible, integer.rounded_shift(a, shift + 1), 0)
        fall = jnp.clip(15 + highest[..., None] - values.exponent, 15, 31)  # at least 15 where it is visible
        weight = integer.rounded_shift(p * values.mantissa, fall)
        more_high, more_low = (_each(part, values.values, 3, 2) for part in integer.split(weight))
        return of_all + p.sum(-1, dtype=U32), of_high + more_high, of_low + more_low

    num_steps = jnp.max(positions) // (at_once * page) + 1
    rows = of_query.shape
    least = jnp.full(rows, NO_SCORE, I32)
    largest, highest, is_bad = lax.fori_loop(0, num_steps, look, (least, least, jnp.zeros(rows, bool)))
    highest = jnp.where(highest == NO_SCORE, 0, highest)  # of rows that see nothing, which pad a pass
    nothing = jnp.zeros(rows, U32), jnp.zeros((*rows, H), I32), jnp.zeros((*rows, H), I32)
    of_all, of_high, of_low = lax.fori_loop(0, num_steps, add, nothing)
    of_all = jnp.maximum(of_all, 2**14)
    fall = integer.bit_length(of_all) - 15
    carried = jnp.where(fall > 0, (of_all >> jnp.maximum(fall - 1, 0).astype(U32)) & 1, 0)
    inverse = lax.div(jnp.full(rows, 2**29, I32), ((of_all >> fall.astype(U32)) + carried).astype(I32))
    found = integer.scaled(of_high + ((of_low + 128) >> 8), inverse[..., None], (fall - highest - 10)[..., None])
    found = jnp.where((is_bad | integer.is_lost(exponent))[..., None], LIMIT, found)
    return jnp.moveaxis(found.reshape(G, K, Q, W, H), 3, 1).reshape(G * W, K * Q, H)


def _each(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    """Sums of products along axes `of_a` and `of_b` of int8 arrays whose first two axes are the same."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((0, 1), (0, 1))), preferred_element_type=I32)
