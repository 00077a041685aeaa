"""Attention of integer models over pages of keys and values of 8 bits, in XLA.

A slot has `mantissa + 2**16 * exponent` of its token and head. Attention looks at a block of pages twice: first for the largest
score and exponent, then for the sums, which may be added up in any order. One block that holds all pages is looked at once, and
is no loop: a GPU asks its host whether a loop goes on. Sums over all positions need more than 32 bits, so they are held in two
words, `high * 2**8 + low`, and after each block the lower one is carried.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from detspec.cache import Int8Pages, append
from detspec.integer.spec import FRACTION, LIMIT, Activations, Cached, SoftCap
from detspec.ops import integer
from detspec.ops.integer import I32, NO_SCORE

MOST_AT_ONCE = 2**16  # positions of a block, or of a page, whose sums 32 bits hold


class PageLayout(NamedTuple):
    """How pages lie in memory and are read: for speed alone, no bit depends on it.

    Attributes:
        block: positions that a step of attention looks at. On a CPU they fit into its cache; for a TPU more compile long.
        value_slot_axis: 2 if pages of values are `[num_pages, K, page, H]` like those of keys, 3 if `[num_pages, K, H, page]`:
            a GPU's products of int8 add up what lies side by side.
        by_words: whether pages are copied four numbers at a time.
    """

    block: int = 256
    value_slot_axis: int = 2
    by_words: bool = False


PLAIN = PageLayout()
GPU = PageLayout(block=2048, value_slot_axis=3, by_words=True)


class ScoreScale(NamedTuple):
    """Numbers that scores are multiplied with, times log2(e): about `mantissa * 2**exponent`; and their soft cap."""

    mantissa: int
    exponent: int
    cap: SoftCap | None = None


class Queries(NamedTuple):
    """The queries of each KV head, by heads and then by windows."""

    words: jax.Array  # [G, K, 2 * Q * W, H] int8, see `words_of`
    mantissa: jax.Array  # [G, K, Q * W] int32, with that of scores
    exponent: jax.Array  # [G, K, Q * W] int32, with that of scores
    position: jax.Array  # [G, Q * W] int32


class Words(NamedTuple):
    """Sums `high * 2**8 + low`."""

    high: jax.Array  # int32
    low: jax.Array  # int32, 0 .. 255 once it is `carried`


class Sums(NamedTuple):
    """Sums over all positions that a query sees."""

    of_all: Words  # [G, K, Q * W], of probabilities
    of_values: Words  # [G, K, Q * W, H], of values times their weights
    highest: jax.Array  # [G, K, Q * W] int32, of exponents of values
    is_bad: jax.Array  # [G, K, Q * W] bool, whether a key or value had left its range


def appended(
    pages: Any, x: jax.Array, row: Activations, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2
) -> Int8Pages:
    """`pages` with keys or values `x [R, K, H]`, which stand for `x * row.mantissa * 2**row.exponent`, at places `[R]`."""
    new = integer.cached(x, row)
    scale = (new.exponent << 16) | new.mantissa
    return Int8Pages(
        values=append(pages.values, new.values, page_ids, slots, slot_axis=slot_axis),
        scale=append(pages.scale[..., None], scale[..., None], page_ids, slots)[..., 0],
    )


def attended(
    q: Activations,
    pools: Any,
    tables: jax.Array,
    positions: jax.Array,
    *,
    score: ScoreScale,
    window: int | None,
    layout: PageLayout = PLAIN,
) -> jax.Array:
    """Attention of queries `[G * W, N, H]` at `positions [G, W]` over pages by `tables [G, max_pages]`: fixed `[G * W, N, H]`.

    See `spec.attended`.
    """
    G = positions.shape[0]
    K, page, H = pools.k.values.shape[1:]
    max_pages = tables.shape[1]
    at_once = min(max(1, layout.block // page), max_pages)
    tables = jnp.pad(tables, ((0, 0), (0, -max_pages % at_once)))
    queries = queries_of(q, positions, K, score)
    looking_from = queries.position[:, None, :, None]

    def block_of(pages: Any, step: int | jax.Array, slot_axis: int = 2) -> Cached:
        ids = lax.dynamic_slice_in_dim(tables, step * at_once, at_once, axis=1)
        values = pages.values
        words = _words(values) if layout.by_words and values.shape[3] % 4 == 0 else values
        shape = (G, K, at_once * page, -1) if slot_axis == 2 else (G, K, H, -1)
        copied = jnp.moveaxis(words[ids], 1, slot_axis).reshape(shape)
        values = copied if words is values else _numbers(copied)
        scale = jnp.moveaxis(pages.scale[ids], 2, 1).reshape(G, K, 1, at_once * page)
        return Cached(values, *scale_of(scale))

    def visible_at(step: int | jax.Array) -> jax.Array:
        place = step * (at_once * page) + jnp.arange(at_once * page, dtype=I32)[None, None, None, :]
        return is_visible(place, looking_from, window)

    def scores(step: int | jax.Array, keys: Cached) -> jax.Array:
        high, low = jnp.split(_each(queries.words, keys.values, 3, 3), 2, axis=2)
        total = (high << 8) + low
        found = scores_of(total, queries.mantissa, queries.exponent, keys)
        found = found if score.cap is None else integer.soft_capped(found, score.cap)
        return jnp.where(visible_at(step), found, NO_SCORE)

    def look(step: int | jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, highest, is_bad = carry
        keys = block_of(pools.k, step)
        values = block_of(pools.v, step, layout.value_slot_axis)
        visible = visible_at(step)
        lost = integer.is_lost(keys.exponent) | integer.is_lost(values.exponent)
        return (
            jnp.maximum(largest, scores(step, keys).max(-1)),
            jnp.maximum(highest, jnp.where(visible, values.exponent, NO_SCORE).max(-1)),
            is_bad | (visible & lost).any(-1),
        )

    def add(step: int | jax.Array, carry: tuple[Words, Words]) -> tuple[Words, Words]:
        of_all, of_values = carry
        keys = block_of(pools.k, step)
        values = block_of(pools.v, step, layout.value_slot_axis)
        p, weight = weights_of(scores(step, keys), largest, highest, values, visible_at(step))
        more_high, more_low = jnp.split(_each(words_of(weight), values.values, 3, layout.value_slot_axis), 2, axis=2)
        return (
            carried(of_all.high, of_all.low + p.sum(-1, dtype=I32)),
            carried(of_values.high + more_high, of_values.low + more_low),
        )

    def over_blocks(body: Callable[..., Any], first: Any) -> Any:
        if at_once == max_pages:
            return body(0, first)
        return lax.fori_loop(0, jnp.max(positions) // (at_once * page) + 1, body, first)

    rows = queries.mantissa.shape
    least = jnp.full(rows, NO_SCORE, I32)
    largest, highest, is_bad = over_blocks(look, (least, least, jnp.zeros(rows, bool)))
    highest = or_none(highest)
    nothing = (Words(*(jnp.zeros(shape, I32) for _ in "hl")) for shape in (rows, (*rows, H)))
    of_all, of_values = over_blocks(add, tuple(nothing))
    return quotients(queries, Sums(of_all, of_values, highest, is_bad), positions.shape)


def queries_of(q: Activations, positions: jax.Array, num_kv_heads: int, score: ScoreScale) -> Queries:
    """The queries `q [G * W, N, H]` at `positions [G, W]` of each KV head."""
    G, W = positions.shape

    def by_head(x: jax.Array) -> jax.Array:  # [R, N, ...] -> [G, K, Q * W, ...]
        x = x.reshape(G, W, num_kv_heads, -1, *x.shape[2:])
        return jnp.moveaxis(x, 1, 3).reshape(G, num_kv_heads, -1, *x.shape[4:])

    of_query = by_head(integer.rounded_shift(q.mantissa * score.mantissa, 15))
    Q = of_query.shape[2] // W
    return Queries(words_of(by_head(q.values)), of_query, by_head(q.exponent + score.exponent), jnp.tile(positions, (1, Q)))


def words_of(x: jax.Array) -> jax.Array:
    """Both words of int32 `[G, K, rows, n]`, see `integer.split`, as the rows of one product: int8 `[G, K, 2 * rows, n]`."""
    return jnp.concatenate(integer.split(x), axis=2)


def scale_of(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mantissas and exponents of slots."""
    return scale & 0xFFFF, scale >> 16


def is_visible(place: jax.Array, looking_from: jax.Array, window: int | None) -> jax.Array:
    """Whether a query sees a place."""
    visible = place <= looking_from
    return visible if window is None else visible & (place > looking_from - window)


def scores_of(total: jax.Array, mantissa: jax.Array, exponent: jax.Array, keys: Cached) -> jax.Array:
    """Scores `[..., S]` of sums of products, for queries `[...]`."""
    of_both = integer.rounded_shift(mantissa[..., None] * keys.mantissa, 15)
    return integer.scaled(total, of_both, -(exponent[..., None] + keys.exponent + 30 + FRACTION))


def weights_of(
    scores: jax.Array, largest: jax.Array, highest: jax.Array, values: Cached, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Probabilities before they are divided, and with the scales of values, `[..., S]`."""
    a, shift = integer.power(jnp.maximum(largest[..., None] - scores, 0))
    p = jnp.where(visible, integer.rounded_shift(a, shift + 1), 0)
    fall = jnp.clip(15 + highest[..., None] - values.exponent, 15, 31)  # at least 15 where it is visible
    return p, integer.rounded_shift(p * values.mantissa, fall)


def carried(high: jax.Array, low: jax.Array) -> Words:
    """Moves what a lower word has beyond 8 bits to the upper one."""
    return Words(high + (low >> 8), low & 0xFF)


def or_none(highest: jax.Array) -> jax.Array:
    """`highest`, or 0 of rows that see nothing, which pad a pass."""
    return jnp.where(highest == NO_SCORE, 0, highest)


def quotients(queries: Queries, sums: Sums, shape: tuple[int, ...]) -> jax.Array:
    """Fixed `[G * W, N, H]`, of windows of `shape (G, W)`."""
    G, W = shape
    _, K, rows, H = sums.of_values.high.shape
    high = jnp.maximum(sums.of_all.high, 2**6)  # one probability is 2**14
    fall = integer.bit_length(high) - 7
    of_few = integer.rounded_shift(jnp.minimum(high, 2**15) * 2**8 + sums.of_all.low, fall)
    of_many = integer.rounded_shift(high, jnp.maximum(fall - 8, 0))  # the lower word is below half of what is rounded
    inverse = lax.div(jnp.full(fall.shape, 2**29, I32), jnp.where(fall > 8, of_many, of_few))
    total = sums.of_values.high + ((sums.of_values.low + 128) >> 8)
    found = integer.scaled(total, inverse[..., None], (fall - sums.highest - 10)[..., None])
    found = jnp.where((sums.is_bad | integer.is_lost(queries.exponent))[..., None], LIMIT, found)
    return jnp.moveaxis(found.reshape(G, K, rows // W, W, H), 3, 1).reshape(G * W, -1, H)


def _words(x: jax.Array) -> jax.Array:
    """int8 `[..., n]` as int32 `[..., n / 4]`, the same bytes."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), I32)


def _numbers(x: jax.Array) -> jax.Array:
    """int32 `[..., n]` as int8 `[..., 4 * n]`, the same bytes."""
    return lax.bitcast_convert_type(x, jnp.int8).reshape(*x.shape[:-1], -1)


def _each(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    """Sums of products along axes `of_a` and `of_b` of int8 arrays whose first two axes are the same."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((0, 1), (0, 1))), preferred_element_type=I32)
