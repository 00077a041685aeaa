"""Log-probabilities, noise and filters of integer models, in int32 and uint32: the functions of `detspec.integer.spec`.

Sums over a vocabulary are held in two words, `high * 2**14 + low`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from detspec.integer.spec import BEND, FRACTION, GUMBEL_SHIFT, LIMIT, LN_2, LOG2_E, LOGS, SMALLEST_LOGPROB, weight_bits
from detspec.ops.gumbel import threefry2x32
from detspec.ops.integer import I32, U32, absolute, added, bit_length, power, rounded_shift, scaled

ONE = 0x3F80_0000  # the bits of 1 in float32
WORD = 14  # bits of the lower word of a sum


class Log2(NamedTuple):
    """A logarithm to base 2."""

    whole: jax.Array  # int32
    part: jax.Array  # int32, 0 .. 2**26: 26 fraction bits


class Arc(NamedTuple):
    """An arc of the logarithm to base 2, of 256 between 1 and 2: a chord, and how far the arc bends away from it; int32."""

    here: jax.Array  # where the chord begins
    step: jax.Array  # how far it rises
    bend: jax.Array


def arc_at(place: jax.Array) -> Arc:
    """The arcs `place`, 0 .. 255."""
    table = jnp.asarray(LOGS, I32)
    of_place = (256 + place) * (256 + place)
    bend = lax.div(jnp.full_like(of_place, BEND), of_place)
    return Arc(table[place], table[place + 1] - table[place], bend)


def log2(u: jax.Array, arc_at: Callable[[jax.Array], Arc] = arc_at) -> Log2:
    """See `spec.log2`; of uint32."""
    bits = bit_length(u)
    z = (u << jnp.clip(32 - bits, 0, 31).astype(U32)) & U32(0x7FFF_FFFF)
    place = (z >> 23).astype(I32)
    rest = (z & 0x7F_FFFF).astype(I32)
    arc = arc_at(place)
    x = rest >> 11
    bend = rounded_shift(arc.bend * ((x * (4096 - x)) >> 10), 14)
    return Log2(bits - 1, arc.here + scaled(arc.step, rest >> 8, 15) + bend)


def natural(log: Log2) -> jax.Array:
    """See `spec.natural`."""
    return scaled((log.whole << 18) + rounded_shift(log.part, 8), LN_2, 17)


def weights_of(below: jax.Array, bits: int = 28) -> jax.Array:
    """See `spec.weights_of`."""
    a, n = power(scaled(jnp.clip(below, 0, 2**26), LOG2_E, 14))
    return rounded_shift(a << (bits - 15), n)


class Sum(NamedTuple):
    """A sum `high * 2**14 + low` of numbers of at most 28 bits."""

    high: jax.Array  # uint32
    low: jax.Array  # uint32, below 2**14 once it is `carried`


def words(x: jax.Array) -> Sum:
    """`x >= 0` in two words."""
    return Sum((x >> WORD).astype(U32), (x & (2**WORD - 1)).astype(U32))


def carried(high: jax.Array, low: jax.Array) -> Sum:
    """Moves what a lower word has beyond 14 bits to the upper one."""
    return Sum(high + (low >> WORD), low & (2**WORD - 1))


def summed(x: jax.Array, bits: int, sum_fn: Callable[[jax.Array], jax.Array]) -> Sum:
    """The sums by `sum_fn` of weights `x [R, V]` with so many fraction bits, see `spec.weight_bits`.

    Those of 26 bits are halves of 13 bits, of which more add up to 32 bits.
    """
    if bits == 28:
        high, low = words(x)
        return carried(sum_fn(high), sum_fn(low))
    low = sum_fn((x & (2**13 - 1)).astype(U32))
    high = sum_fn((x >> 13).astype(U32)) + (low >> 13)
    return Sum(high >> 1, ((high & 1) << 13) | (low & (2**13 - 1)))


def log_of(total: Sum) -> Log2:
    """The logarithm to base 2 of a sum, of its highest 32 bits."""
    high, low = total
    bits = jnp.where(high > 0, WORD + bit_length(high), bit_length(low))
    fall = jnp.clip(bits - 32, 0, WORD).astype(U32)
    log = log2((high << (WORD - fall)) | (low >> fall))
    return Log2(log.whole + fall.astype(I32), log.part)


def logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """See `spec.logprobs`."""
    largest = logits.max(-1, keepdims=True)
    bits = weight_bits(logits.shape[1])
    log = log_of(summed(weights_of(largest - logits, bits), bits, _row_sum))
    below = jnp.clip(jnp.take_along_axis(logits - largest, tokens[:, None], axis=1)[:, 0], -LIMIT, 0)
    return jnp.maximum(below - natural(log._replace(whole=log.whole - bits)), SMALLEST_LOGPROB)


def _row_sum(x: jax.Array) -> jax.Array:
    return x.sum(-1, dtype=U32)


def _sum_before(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, axis=1, dtype=U32) - x


def as_float32(x: jax.Array) -> jax.Array:
    """Fixed `x` of at most 24 bits and a sign as the float32 of the same value, by its bits: nothing is rounded."""
    size = absolute(x).astype(I32)
    bits = bit_length(size)
    mantissa = (size << jnp.clip(24 - bits, 0, 31)) & 0x7F_FFFF
    pattern = jnp.where(size == 0, 0, ((bits - 1 - FRACTION + 127) << 23) | mantissa) | jnp.where(x < 0, -(2**31), 0)
    return lax.bitcast_convert_type(pattern, jnp.float32)


def gumbel(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """See `spec.gumbel`: fixed `[R, V]`."""
    key = noise_key(seed, position)
    count = jnp.arange(vocab_size, dtype=U32)[None, :]
    x, y = threefry2x32((key[0][:, None], key[1][:, None]), (jnp.zeros((), U32), count))
    return gumbel_of(x ^ y)


def noise_key(seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key of the noise of `seed [R]` at `position [R]`, two uint32."""
    zero = jnp.zeros((), U32)
    return threefry2x32((zero, seed.astype(U32)), (zero, position.astype(U32)))


def gumbel_of(bits: jax.Array, arc_at: Callable[[jax.Array], Arc] = arc_at) -> jax.Array:
    """The noise that random `bits`, uint32, are turned into: fixed."""
    uniform = log2(bits | U32(1), arc_at=arc_at)
    waiting = (U32(32) - uniform.whole.astype(U32) << 26) - uniform.part.astype(U32)
    log = log2(jnp.where(waiting == 0, U32(1), waiting), arc_at=arc_at)
    return GUMBEL_SHIFT - natural(log._replace(whole=log.whole - 26))


def number(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `spec.number`; of a normal float32, by its bits."""
    bits = lax.bitcast_convert_type(x, I32)
    mantissa = (bits & 0x7F_FFFF) | 0x80_0000
    return rounded_shift(mantissa, 8), ((bits >> 23) & 0xFF) - 126 - 16


def fixed(x: jax.Array) -> jax.Array:
    """See `spec.fixed`; of a float32, by its bits."""
    bits = lax.bitcast_convert_type(x, I32)
    exponent = (bits >> 23) & 0xFF
    mantissa = jnp.where(exponent > 0, (bits & 0x7F_FFFF) | 0x80_0000, 0)
    return scaled(jnp.where(bits < 0, -mantissa, mantissa), 1, 24 - FRACTION - (exponent - 126))


def tempered(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """See `spec.tempered`."""
    m, e = number(jnp.where(is_positive(temperature), temperature, jnp.float32(1)))
    below = jnp.maximum(logits - logits.max(-1, keepdims=True), -LIMIT)
    found = scaled(below, lax.div(jnp.full_like(m, 2**30), m)[:, None], (30 + e)[:, None])
    found = jnp.where(logits <= -LIMIT, -LIMIT, found)
    return jnp.where(logits.max(-1, keepdims=True) >= LIMIT, LIMIT, found)


def is_positive(x: jax.Array) -> jax.Array:
    """Whether a float32 is positive, by its bits."""
    return lax.bitcast_convert_type(x, I32) > 0


def is_filtered(asked: Any) -> jax.Array:
    """See `filters.is_filtered`; by the bits of floats."""
    is_share = lax.bitcast_convert_type(asked.top_p, I32) < ONE
    return is_positive(asked.temperature) & ((asked.top_k > 0) | is_share | is_positive(asked.min_p))


def has_penalties(asked: Any) -> jax.Array:
    """Rows that `penalised` may change, `[R]` bool; by the bits of floats."""
    repetition, *others = (
        lax.bitcast_convert_type(x, I32) for x in (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)
    )
    return (repetition != ONE) | (others[0] != 0) | (others[1] != 0)


def kept_from(below: jax.Array, asked: Any) -> jax.Array:
    """The least tempered logit `[R]` that the filters of each row keep, see `spec.kept`; `asked` has them as `[R]`."""
    V = below.shape[1]
    filtered = is_positive(asked.temperature)
    m, e = number(asked.min_p)
    of_share = log2(m.astype(U32) << 15)
    floor = jnp.minimum(natural(Log2(of_share.whole + e - 15, of_share.part)), 0)
    floor = jnp.where(filtered & is_positive(asked.min_p), floor, -LIMIT)
    ordered = -jnp.sort(-below, axis=1)
    by_rank = filtered & (asked.top_k > 0) & (asked.top_k < V)
    rank = jnp.clip(asked.top_k - 1, 0, V - 1)[:, None]
    floor = jnp.where(by_rank, jnp.maximum(floor, jnp.take_along_axis(ordered, rank, axis=1)[:, 0]), floor)

    bits = weight_bits(V)
    p = jnp.where(ordered >= floor[:, None], weights_of(-ordered, bits), 0)
    before = summed(p, bits, _sum_before)
    total = summed(p, bits, _row_sum)
    share = fixed(asked.top_p)
    is_likely = _is_less(_limbs(before, up=1), _times(total, share))
    last = jnp.maximum(is_likely.sum(-1, dtype=I32) - 1, 0)[:, None]
    nucleus = jnp.take_along_axis(ordered, last, axis=1)[:, 0]
    by_share = filtered & (share < 2**FRACTION)
    return jnp.where(by_share, jnp.maximum(floor, nucleus), floor)


def _limbs(total: Sum, *, up: int = 0) -> tuple[jax.Array, ...]:
    """A sum times `2**(16 * up)` as four limbs of 16 bits, the lowest first."""
    zero = jnp.zeros_like(total.low)
    found = (((total.high & 3) << WORD) | total.low, (total.high >> 2) & 0xFFFF, total.high >> 18)
    return (*[zero] * up, *found, *[zero] * (1 - up))


def _times(total: Sum, share: jax.Array) -> tuple[jax.Array, ...]:
    """A sum `[R]` times `share [R]` below `2**16`, as four limbs `[R, 1]`."""
    factor = share.astype(U32)
    found = []
    carry = jnp.zeros_like(total.low)
    for limb in _limbs(total)[:3]:
        value = limb * factor + carry
        found.append(value & 0xFFFF)
        carry = value >> 16
    return tuple(limb[:, None] for limb in (*found, carry))


def _is_less(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
    """Whether `a < b`, of limbs with the lowest first."""
    found = jnp.zeros((), bool)
    for one, other in zip(a, b, strict=True):
        found = (one < other) | ((one == other) & found)
    return found


def biased(logits: jax.Array, bias: jax.Array) -> jax.Array:
    """Fixed `logits` plus a float32 `bias`, see `spec.held`."""
    return held(logits, added(logits, fixed(bias)))


def held(given: jax.Array, found: jax.Array) -> jax.Array:
    """See `spec.held`."""
    return jnp.where(absolute(given) >= LIMIT, given, jnp.clip(found, -LIMIT + 1, LIMIT - 1))


def penalised(logits: jax.Array, seen: jax.Array, count: jax.Array, asked: Any) -> jax.Array:
    """See `spec.penalised`; `seen [R, V]` bool, `count [R, V]` int32."""
    given = logits
    m, e = number(asked.repetition_penalty)
    less = scaled(logits, lax.div(jnp.full_like(m, 2**30), m)[:, None], (30 + e)[:, None])
    more = scaled(logits, m[:, None], -e[:, None])
    logits = jnp.where(seen, jnp.where(logits > 0, less, more), logits)
    of_count = _times_number(count, asked.frequency_penalty[:, None])
    of_presence = jnp.where(count > 0, fixed(asked.presence_penalty)[:, None], 0)
    return held(given, added(added(logits, -of_count), -of_presence))


def _times_number(count: jax.Array, x: jax.Array) -> jax.Array:
    """`count >= 0` times a float32, fixed."""
    m, e = number(x)
    bits = lax.bitcast_convert_type(x, I32)
    size = jnp.where((bits >> 23) & 0xFF > 0, scaled(count, m, -(e + FRACTION)), 0)
    return jnp.where(bits < 0, -size, size)
