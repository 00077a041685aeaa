"""The arithmetic "integer/1": an integer model as functions of integers. This file is the definition; it imports numpy alone.

The arithmetic "integer8/1" has activations of 8 bits in the place of 15: `product` rounds them, and `spread` precedes the last
product of an MLP, and the stream after a norm of a part's output. All else is the same.

Sums of integers are associative: any batch, order, split, number of chips, library and compiler gives these values.

    fixed      an integer with 16 fraction bits: the stream, logits, log-probabilities, biases
    Activations        about `values * mantissa * 2**exponent`, `values` of 15 bits with sign: what is multiplied with a matrix
    IntMatrix     int8 with mantissa and exponent for each output, in the same way
    Cached     int8 with mantissa and exponent for each token and head: a key, or a value

Numbers that requests give are float32; those nearer to 0 than 2**-126 count as 0, and a temperature as 2**-126.

There are two roundings, `rounded_shift` and `scaled`, both half up. A number at `+-LIMIT` has left its range, and so has all
that is made of it: where a logit is at `LIMIT`, the text ends with an error.

Limits: `D <= 32768`, `d_ff` and `N * H <= 131072`, `H <= 512`, `V <= 524160` and 262144 positions. Then no sum leaves int32 or
uint32, as tests/integer/test_intervals.py proves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

VERSION = "integer/1"
VERSIONS = {15: VERSION, 8: "integer8/1"}  # by the bits of activations
FRACTION = 16  # fraction bits of fixed numbers
SMALLEST = 2.0**-126  # of float32 without leading zeros, as requests give it
LIMIT = 2**30 - 1  # numbers of this size have left their range
LOST = 10_000  # the exponent of what was made of them; others are far smaller
MAX_POSITIONS = 262_144
SMALL_VOCABULARY = 262_128  # weights of the tokens of larger ones have two bits less, so their sums fit, too
MAX_BLOCK = 2**15  # numbers that a Hadamard transform adds up: with 14 bits each, they stay below LIMIT
LOG2_E = 23_637  # log2(e), 14 fraction bits
GELU = (18_860, 13_493)  # 2 sqrt(2 / pi) log2(e), 13 fraction bits, and 0.044715 times that, 17 fraction bits
GELU_MOST = 5 * 2**16  # from here on gelu_tanh(x) is x, fixed
LN_2 = 22_713  # ln(2), 15 fraction bits
GUMBEL_SHIFT = 24_020  # -ln(ln(2)), 16 fraction bits
SMALLEST_LOGPROB = -(2**24)  # -256, 16 fraction bits: so each log-probability is a float32
EXP2 = (32_768, -22_709, 7_844, -1_743, 224)  # 2**-x for x in 0 .. 1: a polynomial, 15 fraction bits
BEND = 48_408_812  # log2(e) / 2, 26 fraction bits

Array = Any  # int64 of numpy; where other code uses these containers, its own arrays


class Activations(NamedTuple):
    """Rows of about `values * mantissa * 2**exponent`."""

    values: Array  # [..., n], -(2**14 - 1) .. 2**14 - 1
    mantissa: Array  # [...], 2**14 .. 2**15
    exponent: Array  # [...]; more than LOST / 2 for rows that have left their range


class IntMatrix(NamedTuple):
    """A matrix of about `values * mantissa * 2**exponent`."""

    values: Array  # [m, n] int8, -127 .. 127
    mantissa: Array  # [m], 2**14 .. 2**15
    exponent: Array  # [m]


class Scale(NamedTuple):
    """The scale of a norm over `n` numbers, times `sqrt(n)`: about `values * 2**exponent`."""

    values: Array  # [n], -2**14 .. 2**14
    exponent: Array  # []


class Cached(NamedTuple):
    """Keys or values of about `values * mantissa * 2**exponent`."""

    values: Array  # [..., H], -127 .. 127
    mantissa: Array  # [...], 2**13 .. 33025
    exponent: Array  # [...]


class SoftCap(NamedTuple):
    """The soft cap `limit * tanh(x / limit)` of fixed numbers."""

    limit: int  # fixed, 1 .. 2**28
    mantissa: int  # 2 * log2(e) / limit is about mantissa * 2**exponent, 2**14 .. 2**15
    exponent: int


class Sizes(NamedTuple):
    """Sizes of a model that its arrays do not show."""

    num_heads: int  # `N`
    num_kv_heads: int  # `K`, divides `N`
    score_mantissa: int  # what scores are multiplied with, times log2(e): about score_mantissa * 2**score_exponent
    score_exponent: int
    epsilon: int  # the norms' epsilon, 32 fraction bits
    steps: tuple[tuple[int, ...], ...]  # for each layer, turns of a rotation from one position to the next, 48 fraction bits
    windows: tuple[int | None, ...]  # for each layer, how many positions a token sees, its own included; None is all
    activation_bits: int = 15  # or 8
    activation: str = "silu"  # or "gelu_tanh"
    score_cap: SoftCap | None = None  # of scores times log2(e)
    logit_cap: SoftCap | None = None


# --- Numbers -----------------------------------------------------------------------------------------------------------------


def rounded_shift(x: Array, r: Array | int) -> Array:
    """`floor(x / 2**r + 1/2)` for `r >= 0`."""
    r = np.minimum(r, 62)
    return (x + ((np.int64(1) << r) >> 1)) >> r


def scaled(x: Array, m: Array | int, r: Array | int) -> Array:
    """`floor(x * m / 2**r + 1/2)`, cut at `+-LIMIT`; `0 <= m <= 2**16`, and `r` is taken as at least -15 and at most 47."""
    r = np.clip(r, -15, 47)
    return np.clip(rounded_shift((x * m) << np.maximum(-r, 0), np.maximum(r, 0)), -LIMIT, LIMIT)


def bit_length(x: Array) -> Array:
    """The bits of `x >= 0`: 0 for 0, 1 for 1, 2 for 2 and 3."""
    return np.frexp(np.asarray(x, np.float64))[1].astype(np.int64)


def dot(a: Array, b: Array) -> Array:
    """`a [..., n, k] @ b [..., k, m]`, exact: by float64 where no sum can reach 2**53."""
    assert float(np.abs(a).max(initial=0)) * float(np.abs(b).max(initial=0)) * a.shape[-1] < 2**53
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)


def narrowed(x: Array, bits: int) -> tuple[Array, Array]:
    """`(values [..., n], shift [...])` with `x` about `values * 2**shift`, of `bits` bits; LOST where it left its range."""
    largest = np.abs(x).max(-1)
    shift = np.maximum(bit_length(largest) - bits, 0)
    most = 2**bits - 1
    values = np.clip(rounded_shift(x, shift[..., None]), -most, most)
    return values, np.where(largest >= LIMIT, LOST, shift)


def row_of(x: Array, exponent: int | Array) -> Activations:
    """The row of `x [..., n]`, integers that stand for `x * 2**exponent`."""
    values, shift = narrowed(x, 14)
    return Activations(values, np.full(shift.shape, 2**14, np.int64), shift + exponent - 14)


def cached(x: Array, row: Activations) -> Cached:
    """Rounds `x [..., H]`, integers that stand for `x * row.mantissa * 2**row.exponent`, to 8 bits; its largest becomes 127."""
    values, shift = narrowed(x, 15)
    largest = np.maximum(np.abs(values).max(-1), 1)
    inverse = (127 << 22) // largest
    raise_by = 15 - bit_length(largest)
    of_127 = rounded_shift((largest << raise_by) * 16_513, 14)  # 128 / 127, so that 127 of these are `largest`
    return Cached(
        values=rounded_shift(values * inverse[..., None], 22),
        mantissa=rounded_shift(of_127 * row.mantissa, 15),
        exponent=np.minimum(shift - raise_by - 7 + 15 + row.exponent, LOST),
    )


def is_lost(exponent: Array) -> Array:
    """Whether what has this exponent has left its range."""
    return exponent > LOST // 2


def added(x: Array, y: Array) -> Array:
    """`x + y`, at `+-LIMIT` where one of them is or the sum would be beyond."""
    total = np.where(np.abs(x) >= LIMIT, x, np.where(np.abs(y) >= LIMIT, y, x + y))
    return np.clip(total, -LIMIT, LIMIT)


# --- Functions ---------------------------------------------------------------------------------------------------------------


def product(row: Activations, matrix: IntMatrix, bias: Array | None = None, *, bits: int = 15) -> Array:
    """`row [..., n]` times `matrix [m, n]`, plus `bias [m]`: fixed `[..., m]`. With 8 `bits` the row is rounded first."""
    row = Activations(*cached(row.values, row)) if bits == 8 else row
    dropped = 0 if bits == 8 else 8  # a product with 15 bits is two products with 8, where there are none of 15
    total = rounded_shift(dot(row.values, matrix.values.T), dropped)
    mantissa = rounded_shift(row.mantissa[..., None] * matrix.mantissa, 15)
    y = scaled(total, mantissa, -(row.exponent[..., None] + matrix.exponent + 15 + dropped + FRACTION))
    y = np.where(is_lost(row.exponent)[..., None], LIMIT, y)
    return y if bias is None else added(y, bias)


def inverse_root(total: Array) -> tuple[Array, Array]:
    """`(root, half)` for `1 <= total < 2**53`: `1 / sqrt(total)` is about `root * 2**(-30 - half)`, `2**14 <= root <= 2**15`.

    A table gives 8 bits, two steps of Newton's iteration the rest.
    """
    half = (bit_length(total) - 31) >> 1
    shift = 2 * half
    u = np.where(shift >= 0, total >> np.maximum(shift, 0), total << np.maximum(-shift, 0))  # 2**30 .. 2**32
    y = INVERSE_ROOTS[u >> 24]
    for _ in range(2):
        y = (_high_word(y, 3 * 2**28 - _high_word(u, _high_word(y, y))) << 3) & 0xFFFF_FFFF
    return y >> 16, half


def _high_word(a: Array, b: Array) -> Array:
    """`floor(a * b / 2**32)` of two numbers below 2**32."""
    product = np.asarray(a).astype(np.uint64) * np.asarray(b).astype(np.uint64)
    return (product >> np.uint64(32)).astype(np.int64)


def normed(x: Array, scale: Scale, epsilon: int) -> Activations:
    """RMSNorm of fixed `x [..., n]`; `epsilon` has 32 fraction bits."""
    values, shift = narrowed(x, 15)
    lost = is_lost(shift)
    shift = np.where(lost, 0, shift)
    total = (values * values).sum(-1) + ((epsilon * x.shape[-1]) >> np.minimum(2 * shift, 31))
    root, half = inverse_root(np.maximum(total, 1))
    row = row_of(values * scale.values, 0)
    exponent = row.exponent + 14 - 30 - half + scale.exponent
    return Activations(row.values, root, np.where(lost, LOST, exponent))


def normed_heads(x: Array, scale: Scale, epsilon: int) -> Activations:
    """RMSNorm of each head of fixed `x [..., heads, H]`; of all heads together where the scale has numbers for all."""
    if len(scale.values) == x.shape[-1]:
        return normed(x, scale, epsilon)
    row = normed(x.reshape(*x.shape[:-2], -1), scale, epsilon)
    of_heads = (np.broadcast_to(part[..., None], x.shape[:-1]) for part in (row.mantissa, row.exponent))
    return Activations(row.values.reshape(x.shape), *of_heads)


def as_fixed(row: Activations) -> Array:
    """The numbers of a row, fixed, at `+-LIMIT` where they are beyond: as the stream takes the output of a norm."""
    y = scaled(row.values, row.mantissa[..., None], -(row.exponent[..., None] + FRACTION))
    return np.where(is_lost(row.exponent)[..., None], LIMIT, y)


def turned_by(positions: Array, steps: Sequence[int]) -> Array:
    """The angles `[T, H/2]` of rotations at `positions [T]`, in turns with 32 fraction bits."""
    each = np.asarray(steps, np.int64)
    of_low = (positions[:, None] * (each & 0xFFFF)) >> 16
    return (positions[:, None] * (each >> 16) + of_low) & 0xFFFF_FFFF


def sine(turns: Array) -> Array:
    """The sine of `turns`, 32 fraction bits, with 14 fraction bits: between places of a table of 1,024 a turn, on lines."""
    place = turns >> 22
    rest = (turns >> 6) & 0xFFFF
    here = SINES[place]
    return rounded_shift(here + (((SINES[place + 1] - here) * rest) >> 16), 6)


def rotated(row: Activations, turns: Array) -> Array:
    """Rotates heads `row [T, heads, H]` by `turns [T, H/2]`: integers that stand for themselves times its scale / 2**14."""
    first, second = np.split(row.values, 2, axis=-1)
    sin = sine(turns)[:, None]
    cos = sine((turns + 2**30) & 0xFFFF_FFFF)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def power(d: Array) -> tuple[Array, Array]:
    """`(a, n)` with `2**-d` about `a * 2**(-15 - n)` for fixed `d >= 0`; `n` ends at 31."""
    fraction = d & 0xFFFF
    a = np.full(d.shape, EXP2[4], np.int64)
    for coefficient in EXP2[3::-1]:
        a = ((a * fraction) >> 16) + coefficient
    return a, np.minimum(d >> 16, 31)


def soft_capped(x: Array, cap: SoftCap) -> Array:
    """Fixed `cap.limit * tanh(x / cap.limit)`; numbers at `+-LIMIT` stay there, since they have left their range."""
    a, shift = power(scaled(np.abs(x), cap.mantissa, -cap.exponent))
    p = rounded_shift(a, shift)  # exp(-2 |x| / limit), 15 fraction bits
    tanh = ((2**15 - p) << 15) // (2**15 + p)  # 15 fraction bits
    found = scaled(np.full_like(tanh, cap.limit), tanh, 15)
    return np.where(np.abs(x) >= LIMIT, x, np.where(x < 0, -found, found))


def attended(q: Activations, keys: Cached, values: Cached, visible: Array, shape: Sizes) -> Array:
    """Attention of queries `[T, N, H]` over `S` keys and values `[S, K, H]`, where `visible [T, S]`: fixed `[T, N, H]`."""
    T, N, H = q.values.shape
    groups = N // shape.num_kv_heads
    out = np.zeros((T, N, H), np.int64)
    for n in range(N):
        k = n // groups
        of_query = rounded_shift(q.mantissa[:, n] * shape.score_mantissa, 15)
        mantissa = rounded_shift(of_query[:, None] * keys.mantissa[None, :, k], 15)
        exponent = q.exponent[:, n, None] + keys.exponent[None, :, k]
        total = dot(q.values[:, n], keys.values[:, k].T)
        score = scaled(total, mantissa, -(exponent + shape.score_exponent + 30 + FRACTION))  # a power of two
        score = score if shape.score_cap is None else soft_capped(score, shape.score_cap)
        largest = np.where(visible, score, -(2**31)).max(-1, keepdims=True)
        a, shift = power(np.where(visible, largest - score, 0))
        p = np.where(visible, rounded_shift(a, shift + 1), 0)  # 14 fraction bits
        highest = np.where(visible, values.exponent[None, :, k], -(2**31)).max(-1, keepdims=True)
        weight = rounded_shift(p * values.mantissa[None, :, k], np.clip(15 + highest - values.exponent[None, :, k], 15, 31))
        sums = rounded_shift(dot(np.where(visible, weight, 0), values.values[:, k]), 8)
        of_all = p.sum(-1)
        fall = bit_length(of_all) - 15
        inverse = 2**29 // rounded_shift(of_all, fall)
        found = scaled(sums, inverse[:, None], (fall - highest[:, 0] - 10)[:, None])
        is_bad = visible & (is_lost(keys.exponent[None, :, k]) | is_lost(values.exponent[None, :, k]))
        out[:, n] = np.where((is_bad.any(-1) | is_lost(q.exponent[:, n]))[:, None], LIMIT, found)
    return out


def gelu_exponent(x: Array) -> Array:
    """Fixed `d` with `gelu_tanh(x) = x / (1 + 2**-d)` for fixed `x >= 0`: `d = x * (GELU[0] + GELU[1] * x**2)`."""
    x = np.minimum(x, GELU_MOST)
    square = rounded_shift(rounded_shift(x, 4) ** 2, 12)  # 12 fraction bits
    return scaled(x, GELU[0] + rounded_shift(square * GELU[1], 16), 13)


def gated(gate: Array, up: Array, activation: str = "silu") -> Activations:
    """The row of `activation(gate) * up` for fixed `[..., d_ff]`: "silu", or "gelu_tanh"."""
    size = np.abs(gate)
    d = gelu_exponent(size) if activation == "gelu_tanh" else scaled(np.minimum(size, 2**26), LOG2_E, 14)
    a, shift = power(d)
    share = 2**30 // (2**15 + rounded_shift(a, shift))  # of a positive gate, 15 fraction bits
    share = np.where(gate >= 0, share, 2**15 - share)
    first, of_first = narrowed(scaled(gate, share, 15), 15)
    second, of_second = narrowed(up, 15)
    lost = (np.abs(gate) >= LIMIT).any(-1) | is_lost(of_first) | is_lost(of_second)
    row = row_of(first * second, 0)
    return row._replace(exponent=np.where(lost, LOST, row.exponent + of_first + of_second - 2 * FRACTION))


def block_of(n: int) -> int:
    """The largest power of two that divides `n`, at most MAX_BLOCK."""
    return min(n & -n, MAX_BLOCK)


def hadamard(x: Array) -> Array:
    """Hadamard transforms of blocks of `x [..., n]`, each `block_of(n)` long: sums and differences, stage by stage.

    Twice the same is `block_of(n) * x`. With blocks of 2: `[a, b, c, d]` becomes `[a + b, a - b, c + d, c - d]`.
    """
    y = x.reshape(*x.shape[:-1], -1, block_of(x.shape[-1]))
    size = 1
    while size < y.shape[-1]:
        first, second = np.split(y.reshape(*y.shape[:-1], -1, 2, size), 2, axis=-2)
        y = np.concatenate([first + second, first - second], axis=-2).reshape(y.shape)
        size *= 2
    return y.reshape(x.shape)


def spread(row: Activations) -> Activations:
    """The Hadamard transform of a row: a large value becomes many small ones, which 8 bits hold. Values then have 29 bits."""
    return row._replace(values=hadamard(row.values))


# --- The model ---------------------------------------------------------------------------------------------------------------


class Text:
    """A text that a model reads, token by token or many at once; it keeps the keys and values of what it has read."""

    def __init__(self, weights: dict[str, Any], shape: Sizes) -> None:
        self.weights = weights
        self.shape = shape
        self.length = 0
        self._kept: list[tuple[Cached, Cached] | None] = [None] * len(weights["layers"])

    def read(self, tokens: Sequence[int]) -> Array:
        """Reads `T` tokens; returns their logits, fixed `[T, V]`."""
        positions = self.length + np.arange(len(tokens))
        x = self.weights["embed"][np.asarray(tokens)].astype(np.int64)
        for index, layer in enumerate(self.weights["layers"]):
            mixed = self._mixed(index, layer, self._before(x, layer.get("attn_norm")), positions)
            x = added(x, self._after(mixed, layer.get("attn_post_norm")))
            row = self._before(x, layer.get("mlp_norm"))
            inner = gated(self._product(row, layer["gate"]), self._product(row, layer["up"]), self.shape.activation)
            transformed = self._product(spread(inner) if self.shape.activation_bits == 8 else inner, layer["down"])
            x = added(x, self._after(transformed, layer.get("mlp_post_norm")))
        self.length += len(tokens)
        logits = self._product(normed(x, self.weights["final_norm"], self.shape.epsilon), self.weights["head"])
        return logits if self.shape.logit_cap is None else soft_capped(logits, self.shape.logit_cap)

    def _before(self, x: Array, scale: Scale | None) -> Activations:
        """The row of the stream `x [T, D]` that a part of a layer reads: after a norm if there is one."""
        return row_of(x, -FRACTION) if scale is None else normed(x, scale, self.shape.epsilon)

    def _after(self, y: Array, scale: Scale | None) -> Array:
        """The numbers that the stream takes of a part's output `y [T, D]`: after a norm if there is one."""
        if scale is None:
            return y
        row = normed(y, scale, self.shape.epsilon)
        return as_fixed(spread(row) if self.shape.activation_bits == 8 else row)

    def _product(self, row: Activations, matrix: IntMatrix, bias: Array | None = None) -> Array:
        """A product with the model's bits of activations."""
        return product(row, matrix, bias, bits=self.shape.activation_bits)

    def _mixed(self, index: int, layer: dict[str, Any], row: Activations, positions: Array) -> Array:
        """Sum that attention adds to the stream of the tokens at `positions [T]`, fixed `[T, D]`."""
        shape = self.shape

        def heads(name: str, number: int) -> Array:
            found = self._product(row, layer[name], layer.get(f"{name}_bias"))
            return found.reshape(len(positions), number, -1)

        def turned(name: str, number: int) -> tuple[Array, Activations]:
            found = heads(name, number)
            scale = layer.get(f"{name}_norm")
            own = row_of(found, -FRACTION) if scale is None else normed_heads(found, scale, shape.epsilon)
            return rotated(own, turned_by(positions, shape.steps[index])), own

        q, of_q = turned("q", shape.num_heads)
        of_turned, shift = narrowed(q, 14)
        queries = Activations(of_turned, of_q.mantissa, of_q.exponent + shift - 14)
        k, of_k = turned("k", shape.num_kv_heads)
        v = heads("v", shape.num_kv_heads)
        plain = np.full(v.shape[:-1], 2**14, np.int64)
        new = (
            cached(k, of_k._replace(exponent=of_k.exponent - 14)),
            cached(v, Activations(v, plain, np.full(v.shape[:-1], -14 - FRACTION))),
        )
        before = self._kept[index]
        keys, values = new if before is None else map(_joined, before, new)
        self._kept[index] = keys, values
        place = np.arange(positions[-1] + 1)
        visible = place <= positions[:, None]
        if shape.windows[index] is not None:
            visible &= place > positions[:, None] - shape.windows[index]
        found = attended(queries, keys, values, visible, shape)
        return self._product(row_of(found.reshape(len(positions), -1), -FRACTION), layer["o"])


def _joined(before: Cached, new: Cached) -> Cached:
    """Keys or values of all positions."""
    return Cached(*(np.concatenate(both) for both in zip(before, new, strict=True)))


# --- Log-probabilities and choices -------------------------------------------------------------------------------------------


def log2(u: Array) -> Array:
    """The logarithm of `1 <= u < 2**32` to base 2, 26 fraction bits: between places of a table, on parabolas."""
    bits = bit_length(u)
    z = (u << (32 - bits)) & 0x7FFF_FFFF
    place = z >> 23
    rest = z & 0x7F_FFFF
    chord = LOGS[place] + rounded_shift((LOGS[place + 1] - LOGS[place]) * (rest >> 8), 15)
    x = rest >> 11
    bend = BEND // ((256 + place) * (256 + place)) * ((x * (4096 - x)) >> 10)
    return ((bits - 1) << 26) + chord + rounded_shift(bend, 14)


def natural(log: Array) -> Array:
    """A fixed natural logarithm from one to base 2 with 26 fraction bits."""
    return rounded_shift(rounded_shift(log, 8) * LN_2, 17)


def weight_bits(vocab_size: int) -> int:
    """The fraction bits of the weights of tokens."""
    return 28 if vocab_size <= SMALL_VOCABULARY else 26


def weights_of(below: Array, bits: int = 28) -> Array:
    """`exp(-below)` with so many fraction `bits` for fixed `below`; 1 where that is negative."""
    a, n = power(scaled(np.clip(below, 0, 2**26), LOG2_E, 14))
    return rounded_shift(a << (bits - 15), n)


def logprobs(logits: Array, tokens: Array) -> Array:
    """Log-probabilities of `tokens`, `[R]` or `[R, k]`, under fixed `logits [R, V]`; fixed, at least -256."""
    largest = logits.max(-1, keepdims=True)
    bits = weight_bits(logits.shape[1])
    total = weights_of(largest - logits, bits).sum(-1)
    fall = np.maximum(bit_length(total) - 32, 0)
    log = natural(log2(total >> fall) + ((fall - bits) << 26))
    found = np.take_along_axis(logits - largest, tokens.reshape(len(tokens), -1), axis=1) - log[:, None]
    return np.maximum(found, SMALLEST_LOGPROB).reshape(tokens.shape)


def likeliest(logits: Array, number: int) -> Array:
    """The tokens `[R, number]` of the largest `logits [R, V]`, the lower one first among equals."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :number]


def threefry(key: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011) on numbers below 2**32."""
    keys = *key, key[0] ^ key[1] ^ 0x1BD1_1BDA
    x = (block[0] + keys[0]) & 0xFFFF_FFFF
    y = (block[1] + keys[1]) & 0xFFFF_FFFF
    for group in range(1, 6):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[(group - 1) % 2]:
            x = (x + y) & 0xFFFF_FFFF
            y = x ^ (((y << rotation) | (y >> (32 - rotation))) & 0xFFFF_FFFF)
        x = (x + keys[group % 3]) & 0xFFFF_FFFF
        y = (y + keys[(group + 1) % 3] + group) & 0xFFFF_FFFF
    return x, y


def gumbel(seed: Array, position: Array, vocab_size: int) -> Array:
    """Gumbel noise of `[R]` seeds at `[R]` positions, fixed `[R, V]`."""
    zero = np.zeros(1, np.int64)
    key = threefry((zero, seed & 0xFFFF_FFFF), (zero, position))
    x, y = threefry((key[0][:, None], key[1][:, None]), (zero, np.arange(vocab_size, dtype=np.int64)[None]))
    waiting = np.maximum((32 << 26) - log2((x ^ y) | 1), 1)  # -log2 of a uniform number, 26 fraction bits
    return GUMBEL_SHIFT - natural(log2(waiting) - (26 << 26))


def number(x: Array) -> tuple[Array, Array]:
    """`(m, e)` with float32 `x > 0` about `m * 2**e`, `2**15 <= m <= 2**16`."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float32))
    return rounded_shift((mantissa * 2**24).astype(np.int64), 8), exponent.astype(np.int64) - 16


def fixed(x: Array) -> Array:
    """A float32 as a fixed number, rounded half up, cut at `+-LIMIT`."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float32))
    return scaled((mantissa * 2**24).astype(np.int64), 1, 24 - FRACTION - exponent.astype(np.int64))


def tempered(logits: Array, temperature: Array) -> Array:
    """How far fixed `logits [R, V]` lie below their largest, over the float32 `temperature [R]`: fixed, at most 0.

    Where the temperature is 0 it is not divided by. A logit of -LIMIT stays there: a token that is banned is so at any
    temperature. A row that has left its range is LIMIT everywhere.
    """
    random = temperature > 0
    m, e = number(np.where(random, temperature, np.float32(1)))
    below = logits - logits.max(-1, keepdims=True)
    found = scaled(np.maximum(below, -LIMIT), (2**30 // m)[:, None], (30 + e)[:, None])
    found = np.where(logits <= -LIMIT, -LIMIT, found)
    return np.where(logits.max(-1, keepdims=True) >= LIMIT, LIMIT, found)


def biased(logits: Array, tokens: Array, bias: Array) -> Array:
    """Fixed `logits [R, V]` with a float32 `bias [n]` added to those of `tokens [n]`, of which no two are equal.

    Those at `+-LIMIT` stay there, and no other gets there.
    """
    found = logits.copy()
    given = logits[:, tokens]
    found[:, tokens] = held(given, added(given, fixed(bias)))
    return found


def banned(logits: Array, position: Array, tokens: Array, until: int) -> Array:
    """Fixed `logits [R, V]` for choices at `position [R]`: before position `until`, those of `tokens [n]` are -LIMIT."""
    found = logits.copy()
    found[np.ix_(position < until, tokens)] = -LIMIT
    return found


def counted(tokens: Array, start: int, position: Array, vocab_size: int) -> Array:
    """How often each token stands in a text from place `start` on, before the choice at `position [R]`: `[R, V]`."""
    return np.stack([np.bincount(tokens[start:end], minlength=vocab_size) for end in position])


def penalised(logits: Array, seen: Array, count: Array, repetition: Array, frequency: Array, presence: Array) -> Array:
    """Fixed `logits [R, V]` after three penalties `[R]`, float32: `seen` in the text, `count` of times among what is new.

    Those at `+-LIMIT` stay there, and no other gets there: a penalty takes no text out of the range.
    """
    given = logits
    m, e = number(repetition)
    less = scaled(logits, (2**30 // m)[:, None], (30 + e)[:, None])
    more = scaled(logits, m[:, None], -e[:, None])
    logits = np.where(seen, np.where(logits > 0, less, more), logits)
    m, e = number(np.where(frequency == 0, np.float32(1), np.abs(frequency)))
    of_count = scaled(count, m[:, None], -(e + FRACTION)[:, None]) * np.sign(frequency).astype(np.int64)[:, None]
    of_presence = np.where(count > 0, fixed(presence)[:, None], 0)
    return held(given, added(added(logits, -of_count), -of_presence))


def held(given: Array, found: Array) -> Array:
    """Logits `found` of those `given`: between `+-(LIMIT - 1)`, and at `+-LIMIT` where they were before."""
    return np.where(np.abs(given) >= LIMIT, given, np.clip(found, -LIMIT + 1, LIMIT - 1))


class Wishes(NamedTuple):
    """Wishes of requests for `R` choices; as `detspec.SamplingParams` has it, with float32 numbers."""

    temperature: Array
    top_k: Array  # 0 keeps all
    top_p: Array  # 1 keeps all
    min_p: Array  # 0 keeps all
    seed: Array


def kept(below: Array, asked: Wishes) -> Array:
    """Which tokens of tempered `below [R, V]` the filters keep: min_p, then top_k, then top_p; equals are kept together."""
    found = np.ones(below.shape, bool)
    for r, row in enumerate(below):
        floor = -LIMIT
        if asked.temperature[r] <= 0:
            continue
        if asked.min_p[r] > 0:
            m, e = number(asked.min_p[r : r + 1])
            floor = max(floor, min(0, int(natural(log2(m << 15) + ((e - 15) << 26))[0])))
        if 0 < asked.top_k[r] < len(row):
            floor = max(floor, int(np.sort(row)[-asked.top_k[r]]))
        found[r] = row >= floor
        share = int(fixed(asked.top_p[r : r + 1])[0])
        if share < 2**FRACTION and found[r].any():
            ordered = np.sort(row[found[r]])[::-1]
            p = weights_of(-ordered, weight_bits(len(row)))
            likelier = np.cumsum(p) - p  # of equals, the first has the right one
            is_likely = ((likelier << FRACTION) < p.sum() * share) | (ordered >= 0)
            found[r] &= row >= ordered[is_likely.sum() - 1]
    return found


def chosen(logits: Array, position: Array, asked: Wishes) -> Array:
    """Tokens `[R]` for fixed `logits [R, V]`; `position [R]` is that of the chosen token. The first of equals is taken."""
    below = tempered(logits, asked.temperature)
    random = (asked.temperature > 0)[:, None]
    by = np.where(random, below + gumbel(asked.seed, position, logits.shape[1]), below) if random.any() else below
    return np.where(kept(below, asked), by, -(2**32)).argmax(-1)


def reported(logits: Array, processed: Array, asked: Wishes, mode: str) -> Array:
    """The logits `[R, V]` whose log-probabilities a request gets by its `logprobs_mode`, for a token that is new.

    "raw": the model's `logits [R, V]`. "tempered": those over the temperature, unless it is 0 or 1. "processed": the
    distribution that a token is drawn from, `processed [R, V]` over the temperature, without what filters leave out.
    """
    if mode == "processed":
        below = tempered(processed, asked.temperature)
        return np.where(kept(below, asked), below, -LIMIT)
    if mode == "tempered":
        changes = (asked.temperature != 0) & (asked.temperature != 1)
        return np.where(changes[:, None], tempered(logits, asked.temperature), logits)
    return logits


# --- Tables: what exact fractions round to -----------------------------------------------------------------------------------


def _tables() -> tuple[Array, Array, Array]:
    """Sines of 1,024 places of a turn, 20 fraction bits; logarithms of 1 .. 2; inverse roots of 1/4 .. 1, 30 fraction bits."""
    from decimal import Decimal, localcontext
    from math import isqrt

    def rounded(x: Decimal) -> int:
        return int((x + Decimal("0.5")).to_integral_value(rounding="ROUND_FLOOR"))

    with localcontext() as context:
        context.prec = 40
        pi = Decimal("3.141592653589793238462643383279502884197")
        quarter = []
        for place in range(257):
            x = 2 * pi * place / 1024
            terms = [x]
            while abs(terms[-1]) > Decimal("1e-30"):
                n = 2 * len(terms)
                terms.append(-terms[-1] * x * x / (n * (n + 1)))
            quarter.append(rounded(sum(terms, Decimal(0)) * 2**20))
        half = [*quarter, *quarter[-2::-1]]
        ln_2 = Decimal(2).ln()
        logs = [rounded((1 + Decimal(i) / 256).ln() / ln_2 * 2**26) for i in range(257)]
    roots = [0] * 64 + [isqrt(2**69 * 4 // (2 * i + 1)) // 2 for i in range(64, 256)]  # 2**30 / sqrt((i + 1/2) / 256)
    return np.asarray([*half, *(-sine for sine in half[1:])]), np.asarray(logs), np.asarray(roots)


SINES, LOGS, INVERSE_ROOTS = _tables()
