"""The arithmetic of integer models in JAX, int32 and uint32 alone: the functions of `detspec.integer.spec` by their names.

What each computes is said there, and nowhere else. Numbers are as there; sums are in whatever order XLA likes.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from detspec.integer.spec import (
    EXP2,
    FRACTION,
    GELU,
    GELU_MOST,
    INVERSE_ROOTS,
    LIMIT,
    LOG2_E,
    LOST,
    SINES,
    Activations,
    Cached,
    IntMatrix,
    Scale,
    SoftCap,
    block_of,
)

I32 = jnp.int32
LINE = 128  # numbers of a row that a TPU moves together
U32 = jnp.uint32
NO_SCORE = -(2**30)  # below all scores, and no difference from one leaves int32


def rounded_shift(x: jax.Array, r: jax.Array | int) -> jax.Array:
    """See `spec.rounded_shift`; int32."""
    r = jnp.broadcast_to(jnp.minimum(jnp.asarray(r, I32), 31), x.shape)
    return (x >> r) + jnp.where(r > 0, (x >> jnp.maximum(r - 1, 0)) & 1, 0)


def scaled(x: jax.Array, m: jax.Array | int, r: jax.Array | int) -> jax.Array:
    """See `spec.scaled`; the product of 48 bits is held in two words, `high * 2**16 + low`."""
    x, m, r = jnp.broadcast_arrays(x, jnp.asarray(m, I32), jnp.clip(jnp.asarray(r, I32), -15, 47))
    of_low = (x & 0xFFFF).astype(U32) * m.astype(U32)
    high = (x >> 16) * m + (of_low >> 16).astype(I32)
    low = (of_low & 0xFFFF).astype(I32)
    raised = jnp.clip(16 - r, 0, 31)
    of_high = jnp.where(r >= 16, high >> jnp.clip(r - 16, 0, 31), high << raised)
    fits = (r >= 16) | ((of_high >> raised) == high)
    below = jnp.where(r >= 0, low >> jnp.clip(r, 0, 31), low << jnp.clip(-r, 0, 31))
    down = of_high | jnp.where(r >= 16, 0, below)
    half = jnp.where(r > 16, high >> jnp.clip(r - 17, 0, 31), low >> jnp.clip(r - 1, 0, 31))
    down = jnp.clip(down, -LIMIT - 1, LIMIT) + jnp.where(r > 0, half & 1, 0)
    return jnp.where(fits, jnp.clip(down, -LIMIT, LIMIT), jnp.where(high < 0, -LIMIT, LIMIT))


def bit_length(x: jax.Array) -> jax.Array:
    """See `spec.bit_length`; of the type of `x`."""
    return (32 - lax.clz(x)).astype(I32)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(high, low)`, int8, with `x == 256 * high + low`: so a product with 15 bits is two products with 8.

    `floor((256 * h + l + 128) / 256) == h + floor((l + 128) / 256)` for their sums `h` and `l`: no sum needs more than int32.
    """
    high = (x + 128) >> 8
    return high.astype(jnp.int8), (x - 256 * high).astype(jnp.int8)


def absolute(x: jax.Array) -> jax.Array:
    """The magnitude of int32, as uint32.

    A GPU takes `max(x, -x)`. Where another signed maximum follows, ptxas 13.0 makes one instruction of both and loses the
    minus; where an unsigned one follows, it does not.
    """
    return jnp.abs(x).astype(U32)


def narrowed(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """See `spec.narrowed`."""
    largest = absolute(x).max(-1).astype(I32)
    shift = jnp.maximum(bit_length(largest) - bits, 0)
    most = 2**bits - 1
    values = jnp.clip(rounded_shift(x, shift[..., None]), -most, most)
    return values, jnp.where(largest >= LIMIT, LOST, shift)


def row_of(x: jax.Array, exponent: int | jax.Array) -> Activations:
    """See `spec.row_of`."""
    values, shift = narrowed(x, 14)
    return Activations(values, jnp.full(shift.shape, 2**14, I32), shift + exponent - 14)


def cached(x: jax.Array, row: Activations) -> Cached:
    """See `spec.cached`."""
    values, shift = narrowed(x, 15)
    largest = jnp.maximum(absolute(values).max(-1), 1).astype(I32)
    inverse = lax.div(jnp.full_like(largest, 127 << 22), largest)
    raise_by = 15 - bit_length(largest)
    of_127 = rounded_shift((largest << raise_by) * 16_513, 14)
    return Cached(
        values=rounded_shift(values * inverse[..., None], 22).astype(jnp.int8),
        mantissa=rounded_shift(of_127 * row.mantissa, 15),
        exponent=jnp.minimum(shift - raise_by - 7 + 15 + row.exponent, LOST),
    )


def is_lost(exponent: jax.Array) -> jax.Array:
    """See `spec.is_lost`."""
    return exponent > LOST // 2


def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """See `spec.added`."""
    total = jnp.where(absolute(x) >= LIMIT, x, jnp.where(absolute(y) >= LIMIT, y, x + y))
    return jnp.clip(total, -LIMIT, LIMIT)


def dot(values: jax.Array, matrix: jax.Array) -> jax.Array:
    """Sums int32 `[..., m]` of the products of int8 `values [..., n]` and `matrix [m, n]`."""
    contracted = ((values.ndim - 1,), (1,)), ((), ())
    return lax.dot_general(values, matrix, contracted, preferred_element_type=I32)


def product(row: Activations, matrix: IntMatrix, bias: jax.Array | None = None, *, bits: int = 15) -> jax.Array:
    """See `spec.product`; `row [R, n]`."""
    (y,) = products(row, matrix, bits=bits)
    return y if bias is None else added(y, _like(y, bias))


def products(row: Activations, *matrices: IntMatrix, bits: int = 15) -> list[jax.Array]:
    """Products of `row [R, n]` with several matrices `[m, n]`: fixed `[R, m]` of each."""
    row, words = in_words(row, bits)
    return [of_sums(row, matrix, dot(words, matrix.values), bits) for matrix in matrices]


def in_words(row: Activations, bits: int) -> tuple[Activations, jax.Array]:
    """`row [R, n]` as it is multiplied, and its int8 words: `[R, n]` of 8 bits, or `[2 * R, n]`, high words first.

    Both words are rows of one product, which reads a matrix once.
    """
    if bits == 8:
        row = Activations(*cached(row.values, row))
        return row, row.values
    return row, jnp.concatenate(split(row.values))


def of_sums(row: Activations, matrix: IntMatrix, sums: jax.Array, bits: int) -> jax.Array:
    """The product of `row [R, n]` and `matrix [m, n]`, of the sums `[R, m]` or `[2 * R, m]` for its words, see `in_words`."""
    if bits == 8:
        total = sums
        dropped = 0
    else:
        high, low = jnp.split(sums, 2)
        total = high + ((low + 128) >> 8)
        dropped = 8
    mantissa = rounded_shift(row.mantissa[..., None] * _like(total, matrix.mantissa), 15)
    exponent = row.exponent[..., None] + _like(total, matrix.exponent)
    y = scaled(total, mantissa, -(exponent + 15 + dropped + FRACTION))
    return jnp.where(is_lost(row.exponent)[..., None], LIMIT, y)


def _like(x: jax.Array, of_last: jax.Array) -> jax.Array:
    """Numbers of the last axis of `x`, with as many axes as it has."""
    return jnp.expand_dims(of_last, range(x.ndim - 1))


def inverse_root(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `spec.inverse_root`; of `high * 2**16 + low`, uint32, `low` below `2**16`."""
    bits = jnp.where(high > 0, 16 + bit_length(high), bit_length(low))
    half = (bits - 31) >> 1
    down = jnp.clip(2 * half, 0, 31).astype(U32)
    by_high = jnp.where(down >= 16, high >> (jnp.maximum(down, 16) - 16), high << (16 - jnp.minimum(down, 16)))
    whole = by_high | (low >> jnp.minimum(down, 31))
    u = whole << jnp.clip(-2 * half, 0, 31).astype(U32)
    y = jnp.asarray(INVERSE_ROOTS, U32)[(u >> 24).astype(I32)]
    for _ in range(2):
        y = _high_word(y, U32(3 * 2**28) - _high_word(u, _high_word(y, y))) << 3
    return (y >> 16).astype(I32), half


def _high_word(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the product of two uint32."""
    low_a = a & 0xFFFF
    low_b = b & 0xFFFF
    first = (a >> 16) * low_b + ((low_a * low_b) >> 16)
    second = low_a * (b >> 16) + (first & 0xFFFF)
    return (a >> 16) * (b >> 16) + (first >> 16) + (second >> 16)


def normed(x: jax.Array, scale: Scale, epsilon: int) -> Activations:
    """See `spec.normed`."""
    values, shift = narrowed(x, 15)
    lost = is_lost(shift)
    shift = jnp.where(lost, 0, shift)
    squares = values * values
    low = (squares & 0xFFFF).astype(U32).sum(-1, dtype=U32)
    low = low + (U32(epsilon * x.shape[-1]) >> jnp.minimum(2 * shift, 31).astype(U32))
    high = (squares >> 16).astype(U32).sum(-1, dtype=U32) + (low >> 16)
    low = low & 0xFFFF
    root, half = inverse_root(high, jnp.where(high == 0, jnp.maximum(low, 1), low))
    row = row_of(values * _like(values, scale.values), 0)
    exponent = row.exponent + 14 - 30 - half + scale.exponent
    return Activations(row.values, root, jnp.where(lost, LOST, exponent))


def as_fixed(row: Activations) -> jax.Array:
    """See `spec.as_fixed`."""
    y = scaled(row.values, row.mantissa[..., None], -(row.exponent[..., None] + FRACTION))
    return jnp.where(is_lost(row.exponent)[..., None], LIMIT, y)


def turned_by(positions: jax.Array, steps: Sequence[int]) -> jax.Array:
    """See `spec.turned_by`: uint32 `[..., H/2]` for `positions [...]` below `2**20`."""
    each = np.asarray(steps, np.int64)
    place = positions[..., None].astype(U32)
    low = _like(place, jnp.asarray(each & 0xFFFF, U32))
    high = _like(place, jnp.asarray(each >> 16, U32))
    of_low = (place >> 16) * low + (((place & 0xFFFF) * low) >> 16)
    return place * high + of_low


def sine(turns: jax.Array) -> jax.Array:
    """See `spec.sine`; of uint32."""
    table = jnp.asarray(SINES, I32)
    place = (turns >> 22).astype(I32)
    rest = ((turns >> 6) & 0xFFFF).astype(I32)
    here = table[place]
    return rounded_shift(here + (((table[place + 1] - here) * rest) >> 16), 6)


def rotated(row: Activations, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """See `spec.rotated`: heads `row [R, heads, H]` by sines and cosines `[R, 1, H/2]`."""
    first, second = jnp.split(row.values, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def power(d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `spec.power`."""
    fraction = d & 0xFFFF
    a = jnp.full(d.shape, EXP2[4], I32)
    for coefficient in EXP2[3::-1]:
        a = ((a * fraction) >> 16) + coefficient
    return a, jnp.minimum(d >> 16, 31)


def soft_capped(x: jax.Array, cap: SoftCap) -> jax.Array:
    """See `spec.soft_capped`."""
    size = absolute(x).astype(I32)
    a, shift = power(scaled(size, cap.mantissa, -cap.exponent))
    p = rounded_shift(a, shift)
    tanh = lax.div((2**15 - p) << 15, 2**15 + p)
    found = scaled(jnp.full_like(x, cap.limit), tanh, 15)
    return jnp.where(size >= LIMIT, x, jnp.where(x < 0, -found, found))


def gelu_exponent(x: jax.Array) -> jax.Array:
    """See `spec.gelu_exponent`."""
    x = jnp.minimum(x, GELU_MOST)
    root = rounded_shift(x, 4)
    square = rounded_shift(root * root, 12)
    return scaled(x, GELU[0] + rounded_shift(square * GELU[1], 16), 13)


def gated(gate: jax.Array, up: jax.Array, activation: str = "silu") -> Activations:
    """See `spec.gated`."""
    size = jnp.minimum(absolute(gate), 2**26).astype(I32)
    a, shift = power(gelu_exponent(size) if activation == "gelu_tanh" else scaled(size, LOG2_E, 14))
    below = 2**15 + rounded_shift(a, shift)
    share = lax.div(jnp.full_like(below, 2**30), below)
    share = jnp.where(gate >= 0, share, 2**15 - share)
    first, of_first = narrowed(scaled(gate, share, 15), 15)
    second, of_second = narrowed(up, 15)
    lost = (absolute(gate) >= LIMIT).any(-1) | is_lost(of_first) | is_lost(of_second)
    row = row_of(first * second, 0)
    exponent = row.exponent + of_first + of_second - 2 * FRACTION
    return row._replace(exponent=jnp.where(lost, LOST, exponent))


def hadamard(x: jax.Array) -> jax.Array:
    """See `spec.hadamard`; `x` of up to 15 bits.

    Stages within a line of a TPU are one product with ones and minus ones, of both words of `x`; the others are sums and
    differences of lines.
    """
    block = block_of(x.shape[-1])
    line = min(block, LINE)
    place = np.arange(line)
    odd = np.bitwise_count(place[:, None] & place[None, :]) % 2
    signs = jnp.asarray(np.where(odd, -1, 1), jnp.int8)
    high, low = (dot(word, signs) for word in split(x.reshape(-1, line)))
    y = (high * 256 + low).reshape(*x.shape[:-1], -1, block // line, line)
    size = 1
    while size < block // line:
        pairs = y.reshape(*y.shape[:-2], -1, 2, size, line)
        first = pairs[..., 0, :, :]
        second = pairs[..., 1, :, :]
        y = jnp.concatenate([first + second, first - second], axis=-2).reshape(y.shape)
        size *= 2
    return y.reshape(x.shape)


def spread(row: Activations) -> Activations:
    """See `spec.spread`."""
    return row._replace(values=hadamard(row.values))
