"""Which tokens the filters of a request keep: min_p first, then top_k, then top_p. Ties with the last token kept are kept too.

What is kept are the logits from some floor on. For min_p and top_k it is found by comparing and counting. For top_p every step
of a bisection would add up probabilities in a fixed order, 32 times. So a token is drawn first and looked at afterwards: it is
kept if the total probability of what is larger is small enough. If not, the draw goes on among what is larger. Likely tokens
are drawn first, so one or two sums are enough:

    top_p 0.6      probability   a 0.5   b 0.3   c 0.2       kept: a, b
    first draw     c:  0.8 are likelier, not kept            then the draw goes on among a and b
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from detspec.ops.row_sum import first_largest, fixed_sum
from detspec.state import SamplingArrays

# logits [R] -> [R] bool each: whether such a logit is kept; whether exactly what is larger is kept
JudgeFn = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def is_filtered(rows: SamplingArrays) -> jax.Array:
    """Rows that a filter may change, `[R]` bool."""
    return (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))


def first_kept(chosen_by: jax.Array, scaled: jax.Array, rows: SamplingArrays) -> jax.Array:
    """The token of each row with the largest `chosen_by [R, V]` among those that its filters keep, `[R]` int32.

    `scaled [R, V]` are the logits over the temperature. The token of a row with a nan or inf logit means nothing.
    """
    filtered = is_filtered(rows) & jnp.isfinite(scaled.max(-1))
    floor = jnp.where(filtered, _floor_of_rank(scaled, rows), -jnp.inf)
    by_share = filtered & (rows.top_p < 1)

    def first_above(below: jax.Array) -> jax.Array:
        is_left = (scaled > below[:, None]) & (scaled >= floor[:, None])
        return first_largest(jnp.where(is_left | ~filtered[:, None], chosen_by, -jnp.inf))

    def among_likeliest() -> jax.Array:
        is_in_nucleus = _nucleus(scaled, floor, rows)

        def draw(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            tokens, below, is_kept = carry
            tokens = jnp.where(is_kept, tokens, first_above(below))
            below = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
            return tokens, below, is_kept | ~by_share | is_in_nucleus(below)

        nothing = jnp.zeros_like(rows.top_k), jnp.full_like(floor, -jnp.inf), jnp.zeros_like(filtered)
        return jax.lax.while_loop(lambda carry: ~carry[2].all(), draw, nothing)[0]

    return jax.lax.cond(jnp.any(by_share), among_likeliest, lambda: first_above(jnp.full_like(floor, -jnp.inf)))


def narrowed(scaled: jax.Array, rows: SamplingArrays, asked: jax.Array) -> jax.Array:
    """`scaled [R, V]`, what the filters leave out at -inf in rows that are `asked [R]` for."""
    cut = asked & is_filtered(rows)

    def leave_out() -> jax.Array:
        floor = _floor_of_rank(scaled, rows)
        is_in_nucleus = _nucleus(scaled, floor, rows)
        lowest = jnp.full_like(floor, -jnp.inf)

        def judge(logit: jax.Array) -> tuple[jax.Array, jax.Array]:
            return is_in_nucleus(logit), jnp.zeros_like(cut)

        of_share = _floor(judge, lowest, scaled.max(-1), cut & (rows.top_p < 1))
        floor = jnp.where(cut, jnp.maximum(floor, of_share), lowest)
        return jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)

    return jax.lax.cond(jnp.any(cut), leave_out, lambda: scaled)


def _floor_of_rank(scaled: jax.Array, rows: SamplingArrays) -> jax.Array:
    """Least logits that min_p and top_k keep, `[R]`."""
    largest = scaled.max(-1)
    by_rank = is_filtered(rows) & (rows.top_k > 0) & (rows.top_k < scaled.shape[1])

    def num_larger(logit: jax.Array) -> jax.Array:
        return (scaled > logit[:, None]).sum(-1, dtype=jnp.int32)

    def widen(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Looks for k logits within a gap of the largest, which saves half of the bisection."""
        gap, is_enough = carry
        is_enough |= num_larger(largest - gap) >= rows.top_k
        return jnp.where(is_enough, gap, 4 * gap), is_enough | jnp.isinf(gap)

    def judge(logit: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = num_larger(logit)
        return number < rows.top_k, number == rows.top_k

    gap, _ = jax.lax.while_loop(lambda carry: ~carry[1].all(), widen, (jnp.ones_like(largest), ~by_rank))
    of_rank = _floor(judge, jnp.where(by_rank, largest - gap, -jnp.inf), largest, by_rank)
    # One logarithm a row. Probabilities of all tokens would be approximations inside a reduction, whose code a GPU's compiler
    # chooses by time. The likeliest token is kept whatever a device's logarithm of 1 is.
    return jnp.maximum(of_rank, jnp.minimum(largest, largest + jnp.log(rows.min_p)))


def _nucleus(scaled: jax.Array, floor: jax.Array, rows: SamplingArrays) -> Callable[[jax.Array], jax.Array]:
    """Says of logits `[R]` whether top_p keeps them among those that reach `floor [R]`, as `[R]` bool."""
    largest = scaled.max(-1)
    p = jnp.where(scaled >= floor[:, None], jnp.exp(scaled - largest[:, None]), 0.0)
    share = rows.top_p * fixed_sum(p)

    def is_in_nucleus(logit: jax.Array) -> jax.Array:
        likelier = fixed_sum(jnp.where(scaled > logit[:, None], p, 0.0))
        return (likelier < share) | (logit >= largest)  # a share may be so small that it is 0

    return is_in_nucleus


def _floor(judge: JudgeFn, least: jax.Array, largest: jax.Array, asked: jax.Array) -> jax.Array:
    """A number `[R]` that those logits reach that `judge` keeps, and no others; -inf in rows that are not `asked [R]` for.

    `judge` must keep the `largest [R]`, nothing below what it does not keep, and not `least [R]` unless that is -inf. Bisection
    runs over the bits: as integers, positive floats keep their order; negative floats do after all bits except the sign are
    flipped.
    """

    def ordered(bits: jax.Array) -> jax.Array:
        return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)

    def key(logit: jax.Array) -> jax.Array:
        return ordered(jax.lax.bitcast_convert_type(logit, jnp.int32))

    def logit(key: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(ordered(key), jnp.float32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        is_kept, parts = judge(logit(middle))
        is_open = low < high
        low = jnp.where(is_open & ~is_kept, middle + 1, low)
        return low, jnp.where(is_open & is_kept, middle, jnp.where(is_open & parts, low, high))

    low = key(jnp.where(asked, least, -jnp.inf))
    low, _ = jax.lax.while_loop(lambda bounds: (bounds[0] < bounds[1]).any(), halve, (low, jnp.where(asked, key(largest), low)))
    return logit(low)
