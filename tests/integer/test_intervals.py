"""No line of the arithmetic in JAX leaves int32, uint32 or int8, nor does a partial sum of products, for the stated sizes.

This is a proof by intervals, see `intervals`: bounds of the arguments go through the traced functions, operation by operation.
What wraps by definition is left out: threefry, and the whole turns of an angle (`turned_by`). Bits that `scaled` shifts out are
looked for by itself (`fits`).

Limits: `D <= 32768`, `d_ff` and `N * H <= 131072`, `H <= 512`, `V <= 524160`, 262144 positions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import KV, Int8Pages
from detspec.integer import spec
from detspec.integer.spec import LIMIT, LOST, MAX_POSITIONS, Activations, IntMatrix, Scale, SoftCap
from detspec.ops import integer, integer_choices, integer_pages
from detspec.ops.integer_pages import GPU, MOST_AT_ONCE, PageLayout, ScoreScale
from tests.integer.falsified import falsified
from tests.integer.intervals import Bounds, Contract, Interval, Leaves, array, bits_of, corners, joined, magnitude, require

D, WIDE, H, V = 32_768, 131_072, 512, 524_160
VOCABULARIES = (spec.SMALL_VOCABULARY, V)
INT32 = Interval(-(2**31), 2**31 - 1)
FIXED = Interval(-LIMIT, LIMIT)
MANTISSA = Interval(2**14 - 8, 2**15 + 16)  # of a row: 2**14, or a root
OF_MATRIX = Interval(2**14, 2**15)
EXPONENT = Interval(-2000, 3 * LOST)
SCORE = ScoreScale(2**15, -20, SoftCap(2**28, 2**15, -26))  # the largest mantissa of what scores are multiplied with
ROOT = MANTISSA
OF_CACHED = Interval(2**13, 33_050)
OF_VALUES = Interval(2**13, 16_525)
UP_TO_14 = Interval(-(2**14) + 1, 2**14 - 1)
SPREAD = Interval(-(2**29 + 2**22), 2**29 + 2**22)  # exact sums end at 2**29; words of 8 bits are bounded apart


# --- Contracts ---------------------------------------------------------------------------------------------------------------


def of_rounded_shift(bounds: Bounds, x: Interval, r: Interval) -> Interval:
    """Monotone in both: a larger shift brings `x / 2**r` nearer to 0."""
    require(r.lo.min() >= 0, f"shift by {r!r}")
    require((r.hi <= 31) | (np.maximum(-x.lo, x.hi) <= 2**30), f"shift of {x!r} by {r!r}")
    return corners(spec.rounded_shift, x, r)


def of_scaled(bounds: Bounds, x: Interval, m: Interval, r: Interval) -> Interval:
    """Monotone in each."""
    require(m.lo.min() >= 0 and m.hi.max() <= 2**16, f"scaled by {m!r}")
    return corners(spec.scaled, x, m, r)


def of_split(bounds: Bounds, x: Interval) -> tuple[Interval, Interval]:
    high = corners(lambda x: (x + 128) >> 8, x)
    require((high.lo >= -128) & (high.hi <= 127), f"split of {x!r}")
    return high, Interval(-128, 127)


def of_narrowed(bits: int) -> Contract:
    def contract(bounds: Bounds, x: Interval) -> tuple[Interval, Interval]:
        largest = magnitude(x).hi
        most = np.minimum(largest, 2**bits - 1)
        shift = np.maximum(bits_of(largest) - bits, 0)
        return Interval(-most, most), Interval(0, np.where(largest >= LIMIT, LOST, shift))

    return contract


def of_high_word(bounds: Bounds, a: Interval, b: Interval) -> Interval:
    return corners(spec._high_word, a, b)


def of_inverse_root(bounds: Bounds, high: Interval, low: Interval) -> tuple[Interval, Interval]:
    require(high.hi.max() < 2**30 and low.hi.max() < 2**16, f"root of {high!r}, {low!r}")
    return Interval(ROOT.lo, ROOT.hi), Interval(-15, 7)


def of_log2(bounds: Bounds, u: Interval) -> tuple[Interval, Interval]:
    return Interval(bits_of(u.lo) - 1, bits_of(u.hi) - 1), Interval(0, 2**26 - 1)


def of_log_of(bounds: Bounds, high: Interval, low: Interval) -> tuple[Interval, Interval]:
    require(low.hi < 2**14, f"lower word {low!r}")
    return Interval(-1, 45), Interval(0, 2**26 - 1)


def anything(bounds: Bounds, *given: Interval) -> tuple[Interval, Interval]:
    return Interval(0, 2**32 - 1), Interval(0, 2**32 - 1)


CONTRACTS: dict[str, Contract] = {
    "rounded_shift": of_rounded_shift,
    "scaled": of_scaled,
    "split": of_split,
    "narrowed_14": of_narrowed(14),
    "narrowed_15": of_narrowed(15),
    "_high_word": of_high_word,
    "inverse_root": of_inverse_root,
    "log2": of_log2,
    "log_of": of_log_of,
    "threefry2x32": anything,
}
ORIGINAL = {name: getattr(module, name) for module in (integer_choices, integer) for name in dir(module)}


@pytest.fixture(autouse=True)
def contracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces functions with a contract as calls of that name."""

    def narrowed(x: jax.Array, bits: int) -> Any:
        def named(x: jax.Array) -> Any:
            return ORIGINAL["narrowed"](x, bits)

        named.__name__ = f"narrowed_{bits}"
        return jax.jit(named)(x)

    def called(name: str) -> Callable[..., Any]:
        if name.startswith("narrowed"):
            return narrowed

        def call(*args: Any, **functions: Any) -> Any:
            def named(*args: Any) -> Any:
                return ORIGINAL[name](*args, **functions)

            named.__name__ = name
            return jax.jit(named)(*args)

        return call

    for contract in CONTRACTS:
        name = contract.partition("_1")[0]
        for module in (integer, integer_choices):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, called(name))


def within(found: Interval, claimed: Interval) -> bool:
    return bool((found.lo >= claimed.lo).all() and (found.hi <= claimed.hi).all())


# --- Proofs of contracts -----------------------------------------------------------------------------------------------------


def numbers(x: Interval, *shape: int) -> tuple[Any, Interval]:
    return array(*shape or (4,)), Interval(x.lo, x.hi)


def each(*values: Any) -> Interval:
    """A case for each value."""
    return Interval(np.asarray(values), np.asarray(values))


def test_rounded_shift_stays_inside():
    Bounds().of(ORIGINAL["rounded_shift"], numbers(INT32), numbers(each(*range(32))))
    Bounds().of(ORIGINAL["rounded_shift"], numbers(FIXED), numbers(Interval(0, 10_000)))


def test_scaled_stays_inside():
    given = numbers(INT32), numbers(Interval(0, 2**16)), numbers(each(*range(-15, 48)))
    assert within(Bounds(drops_bits=True).of(ORIGINAL["scaled"], *given), FIXED)
    with pytest.raises(Leaves, match="mul"):
        Bounds(drops_bits=True).of(ORIGINAL["scaled"], given[0], numbers(Interval(0, 2**16 + 2)), given[2])


def test_split_stays_inside():
    _, low = Bounds().of(ORIGINAL["split"], numbers(each(*range(-(2**15) + 256, 2**15 - 128))))
    assert within(low, Interval(-128, 127))
    with pytest.raises(Leaves, match="int8"):
        Bounds().of(ORIGINAL["split"], numbers(each(2**15 - 128)))


@pytest.mark.parametrize("bits", [14, 15])
def test_narrowed_stays_inside(bits: int):
    x = Interval(-LIMIT, LIMIT)
    values, shift = Bounds(CONTRACTS).of(lambda x: ORIGINAL["narrowed"](x, bits), (array(4, 8), x))
    assert within(values, Interval(-(2**bits) + 1, 2**bits - 1))
    assert within(shift, Interval(0, LOST))
    for most in (0, 1, 5, 2**bits - 1):
        values, shift = Bounds(CONTRACTS).of(lambda x: ORIGINAL["narrowed"](x, bits), (array(4, 8), Interval(-most, most)))
        assert within(values, Interval(-most, most))
        assert within(shift, Interval(0, 0))


def test_high_word_stays_inside():
    word = array(4, dtype=jnp.uint32), Interval(0, 2**32 - 1)
    Bounds().of(ORIGINAL["_high_word"], word, (word[0], Interval(0, 2**32 - 1)))


def parts_of_octaves(most_bits: int, parts: int) -> Interval:
    """All numbers from 1 to below `2**most_bits`: a case for each of `parts` parts of each octave."""
    edges = [1]
    for bit in range(most_bits):
        edges += [2**bit + (2**bit * part) // parts for part in range(1, parts + 1)]
    found = np.unique(edges)
    return Interval(found[:-1], found[1:] - 1)


def test_inverse_root_stays_inside():
    total = parts_of_octaves(46, 1024)
    high = Interval(total.lo >> 16, total.hi >> 16)
    is_one = high.lo == high.hi
    low = Interval(np.where(is_one, total.lo & 0xFFFF, 0), np.where(is_one, total.hi & 0xFFFF, 0xFFFF))
    word = array(4, dtype=jnp.uint32)
    root, half = Bounds(CONTRACTS).of(ORIGINAL["inverse_root"], (word, high), (word, low))
    assert within(root, ROOT)
    assert within(half, Interval(-15, 7))


def test_log2_stays_inside():
    """In the last of 256 places of an octave the logarithm is nearest to the next whole one: cases for each of its places."""
    found = [parts_of_octaves(32, 256)]
    for bit in range(9, 32):
        edges = 2**bit + 2**bit // 256 * 255 + np.arange(min(2 ** (bit - 8), 4096) + 1) * max(2 ** (bit - 20), 1)
        found.append(Interval(edges[:-1], edges[1:] - 1))
    lo = np.concatenate([[0], *(x.lo for x in found)])
    hi = np.concatenate([[0], *(x.hi for x in found)])
    is_last = (
        (bits_of(lo) > 9) & (lo << np.maximum(32 - bits_of(lo), 0) >> 23 == 511) & (hi - lo + 1 == 2.0 ** (bits_of(lo) - 9))
    )
    whole, part = Bounds(CONTRACTS).of(ORIGINAL["log2"], (array(4, dtype=jnp.uint32), Interval(lo[~is_last], hi[~is_last])))
    assert is_last.sum() == 32 - 9
    assert within(whole, Interval(-1, 31))
    assert within(part, Interval(0, 2**26 - 1))


def test_logarithm_of_a_sum_stays_inside():
    octaves = parts_of_octaves(32, 1)
    high = Interval(np.append(octaves.lo, 0), np.append(octaves.hi, 0))
    word = array(4, dtype=jnp.uint32)

    def found(high: jax.Array, low: jax.Array) -> Any:
        return ORIGINAL["log_of"](integer_choices.Sum(high, low))

    whole, part = Bounds(CONTRACTS).of(found, (word, high), (word, Interval(0, 2**14 - 1)))
    assert within(whole, Interval(-1, 45))
    assert within(part, Interval(0, 2**26 - 1))


# --- Functions ---------------------------------------------------------------------------------------------------------------


def row(n: int) -> tuple[Any, Any]:
    return (
        Activations(array(4, n), array(4), array(4)),
        Activations(Interval(UP_TO_14.lo, UP_TO_14.hi), Interval(MANTISSA.lo, MANTISSA.hi), Interval(EXPONENT.lo, EXPONENT.hi)),
    )


def flat(*arguments: tuple[Any, Any]) -> tuple[Callable[..., Any], list[tuple[Any, Any]]]:
    """A function that puts leaves together to arguments, and the leaves."""
    trees = [jax.tree.structure(shape) for shape, _ in arguments]
    leaves = [pair for shape, bound in arguments for pair in zip(jax.tree.leaves(shape), jax.tree.leaves(bound), strict=True)]

    def put(*given: Any) -> list[Any]:
        rest = iter(given)
        return [jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)]) for tree in trees]

    return put, leaves


def bounds_of(fn: Callable[..., Any], *arguments: tuple[Any, Any]) -> Any:
    """The bounds of what a function of trees makes."""
    put, leaves = flat(*arguments)
    return Bounds(CONTRACTS).of(lambda *given: fn(*put(*given)), *leaves)


def fixed(*shape: int) -> tuple[Any, Interval]:
    return array(*shape), Interval(-LIMIT, LIMIT)


def test_rows_stay_inside():
    found = bounds_of(lambda x: integer.row_of(x, -16), fixed(4, WIDE))
    assert within(found.values, UP_TO_14)
    for exponent in (Interval(-2000, 0), Interval(0, 3 * LOST)):
        given = Activations(array(4, H), array(4), array(4)), Activations(UP_TO_14, MANTISSA, exponent)
        bounds_of(lambda x, row: integer.cached(x, row), fixed(4, H), given)
    assert within(bounds_of(integer.added, fixed(4), fixed(4)), FIXED)


def test_cached_stays_inside():
    given = Activations(array(4, H), array(4), array(4)), Activations(UP_TO_14, MANTISSA, EXPONENT)
    found = bounds_of(integer.cached, fixed(4, H), given)
    assert within(found.values, Interval(-127, 127))
    assert within(found.mantissa, OF_CACHED)
    assert within(found.exponent, Interval(-(2**15), LOST))


def test_product_stays_inside_and_so_does_each_partial_sum():
    def matrix(n: int) -> tuple[Any, Any]:
        values = array(3, n, dtype=jnp.int8)
        return IntMatrix(values, array(3), array(3)), IntMatrix(Interval(-127, 127), OF_MATRIX, Interval(-300, 300))

    assert within(bounds_of(integer.product, row(WIDE), matrix(WIDE), fixed(3)), FIXED)
    with pytest.raises(Leaves, match="dot_general"):
        bounds_of(integer.product, row(WIDE + WIDE // 64), matrix(WIDE + WIDE // 64))

    def of_8_bits(*given: Any) -> jax.Array:
        return integer.product(*given, bits=8)

    for values in (UP_TO_14, SPREAD):
        shapes, bounds = row(WIDE)
        assert within(bounds_of(of_8_bits, (shapes, bounds._replace(values=values)), matrix(WIDE), fixed(3)), FIXED)
    with pytest.raises(Leaves, match="dot_general"):
        bounds_of(of_8_bits, row(WIDE + WIDE // 32), matrix(WIDE + WIDE // 32))


@pytest.mark.parametrize("width", [WIDE, 3 * 2**15, 14_336])
def test_spread_rows_stay_inside_and_below_the_limit(width: int):
    assert within(bounds_of(integer.spread, row(width)).values, SPREAD)
    assert SPREAD.hi.max() < LIMIT


@pytest.mark.parametrize("epsilon", [1, (2**31 - 1) // D])
def test_norm_stays_inside(epsilon: int):
    def scale(n: int) -> tuple[Any, Any]:
        return Scale(array(n), array()), Scale(Interval(-(2**14), 2**14), Interval(-100, 200))

    found = bounds_of(lambda x, scale: integer.normed(x, scale, epsilon), fixed(4, D), scale(D))
    assert within(found.values, UP_TO_14)
    assert within(found.mantissa, MANTISSA)
    with pytest.raises(Leaves, match="uint32"):
        bounds_of(lambda x, scale: integer.normed(x, scale, 1), fixed(4, 3 * D), scale(3 * D))


def test_rotation_stays_inside():
    """Whole turns are dropped by definition, so steps are below `2**-32` turns here: the rest is below."""
    steps = (0, 1, 2**16 - 1)
    bounds_of(lambda place: integer.turned_by(place, steps), (array(4), Interval(0, MAX_POSITIONS - 1)))
    places = np.arange(1024) << 22
    sine = bounds_of(integer.sine, (array(4, dtype=jnp.uint32), Interval(places, places + 2**22 - 1)))
    assert within(sine, Interval(-(2**14) - 1, 2**14 + 1))
    head = Activations(array(4, 2, H), array(4, 2), array(4, 2)), Activations(UP_TO_14, MANTISSA, EXPONENT)
    turns = array(4, 1, H // 2), joined(sine)
    assert within(bounds_of(integer.rotated, head, turns, turns), Interval(-(2**30) + 2, 2**30 - 2))


def test_power_and_gate_stay_inside():
    a, n = bounds_of(integer.power, (array(4), Interval(0, 2**31 - 1)))
    assert within(a, Interval(2**13, 2**15))
    assert within(n, Interval(0, 31))
    assert within(bounds_of(integer.gated, fixed(4, WIDE), fixed(4, WIDE)).values, UP_TO_14)


def test_gelu_stays_inside():
    exponent = bounds_of(integer.gelu_exponent, (array(4), Interval(0, LIMIT)))
    assert within(exponent, Interval(0, 2**21))

    def gated(gate: jax.Array, up: jax.Array) -> Any:
        return integer.gated(gate, up, "gelu_tanh")

    assert within(bounds_of(gated, fixed(4, WIDE), fixed(4, WIDE)).values, UP_TO_14)


@pytest.mark.parametrize("exponent", [-60, -26, -18, 0, 20])
@pytest.mark.parametrize("limit", [1, 30 << 16, 2**28])
def test_soft_caps_stay_inside_and_below_their_limit(limit: int, exponent: int):
    cap = SoftCap(limit, 2**15, exponent)
    inside = array(4), Interval(1 - LIMIT, LIMIT - 1)
    assert within(bounds_of(lambda x: integer.soft_capped(x, cap), inside), Interval(-limit, limit))
    assert within(bounds_of(lambda x: integer.soft_capped(x, cap), fixed(4)), FIXED)


@pytest.mark.parametrize("values", [UP_TO_14, SPREAD])
def test_rows_as_the_stream_takes_them_stay_inside(values: Interval):
    shapes, bounds = row(D)
    assert within(bounds_of(integer.as_fixed, (shapes, bounds._replace(values=values))), FIXED)


# --- Choices -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logprobs_stay_inside(vocabulary: int, monkeypatch: pytest.MonkeyPatch):
    tokens = array(4), Interval(0, vocabulary - 1)
    found = bounds_of(integer_choices.logprobs, fixed(4, vocabulary), tokens)
    assert within(found, Interval(-(2**24), 2**24))
    monkeypatch.setattr(spec, "SMALL_VOCABULARY", min(vocabulary + 128, V))
    with pytest.raises(Leaves, match="uint32"):
        bounds_of(integer_choices.logprobs, fixed(4, vocabulary + 128), tokens)
    bounds_of(integer_choices.weights_of, (array(4), INT32))
    bounds_of(integer_choices.as_float32, (array(4), Interval(-(2**24), 2**24)))


def test_noise_stays_inside():
    seeds = array(4, dtype=jnp.uint32), Interval(0, 2**32 - 1)
    noise = bounds_of(lambda seed, pos: integer_choices.gumbel(seed, pos, V), seeds, (array(4), Interval(0, MAX_POSITIONS)))
    assert within(noise, Interval(-LIMIT, LIMIT))
    assert within(bounds_of(jnp.add, fixed(4), (array(4), joined(noise))), INT32)


def float32(*shape: int) -> tuple[Any, None]:
    return array(*shape, dtype=jnp.float32), None


def of_floats(fn: Callable[..., Any], *arguments: tuple[Any, Any]) -> Any:
    """As `bounds_of`, for arguments that are single arrays, with floats among them."""
    return Bounds(CONTRACTS).of(fn, *arguments)


class Asked:
    """Filters and penalties of rows."""

    def __init__(self, *given: Any) -> None:
        self.temperature, self.top_p, self.min_p, self.top_k = given
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty, _ = given


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_filters_stay_inside(vocabulary: int):
    exponents = np.arange(127) << 23
    up_to_1 = Interval(np.append(exponents, 127 << 23), np.append(exponents + 2**23 - 1, 127 << 23))
    below = fixed(4, vocabulary)
    found = of_floats(
        lambda below, *asked: integer_choices.kept_from(below, Asked(*asked)),
        below,
        float32(4),
        (array(4, dtype=jnp.float32), up_to_1),
        float32(4),
        (array(4), Interval(0, 2**31 - 1)),
    )
    assert within(found, FIXED)
    assert within(of_floats(integer_choices.tempered, fixed(4, V), float32(4)), FIXED)


def test_penalties_and_biases_stay_inside():
    found = of_floats(
        lambda logits, count, *asked: integer_choices.penalised(logits, count > 0, count, Asked(*asked, None)),
        fixed(4, V),
        (array(4, V), Interval(0, MAX_POSITIONS)),
        float32(4),
        float32(4),
        float32(4),
    )
    assert within(found, FIXED)
    assert within(of_floats(integer_choices.biased, fixed(4, V), float32(4, V)), FIXED)


# --- Attention ---------------------------------------------------------------------------------------------------------------


def attended(positions: int, block: int) -> Interval:
    """Bounds of attention over so many positions, a page of `block` of them at once."""
    pages = Int8Pages(array(1, 1, block, H, dtype=jnp.int8), array(1, 1, block))

    def run(*given: Any) -> Any:
        q, mantissa, exponent, k, of_k, v, of_v, looking_from = given
        pools = KV(Int8Pages(k, of_k), Int8Pages(v, of_v))
        query = Activations(q, mantissa, exponent)
        tables = jnp.zeros((1, positions // block), jnp.int32)
        return integer_pages.attended(query, pools, tables, looking_from, score=SCORE, window=None, layout=PageLayout(block))

    def packed(mantissa: Interval) -> Interval:
        found = Interval(-(2**31), 2**31 - 1)
        found.parts = Interval(mantissa.lo, mantissa.hi), Interval(-(2**15), LOST)
        return found

    numbers = pages.values, Interval(-127, 127)
    query = (array(1, 1, H), UP_TO_14), (array(1, 1), MANTISSA), (array(1, 1), EXPONENT)
    of_pages = numbers, (pages.scale, packed(OF_CACHED)), numbers, (pages.scale, packed(OF_VALUES))
    return Bounds(CONTRACTS).of(run, *query, *of_pages, (array(1, 1), Interval(-1, positions - 1)))


def test_scales_of_values_are_half_of_those_of_keys():
    given = Activations(array(4, H), array(4), array(4)), Activations(UP_TO_14, Interval(2**14, 2**14), EXPONENT)
    assert within(bounds_of(integer.cached, fixed(4, H), given).mantissa, OF_VALUES)


@pytest.mark.parametrize("block", [GPU.block, MOST_AT_ONCE])
def test_attention_stays_inside_and_so_does_each_partial_sum(block: int):
    assert within(attended(MAX_POSITIONS, block), FIXED)


@pytest.mark.parametrize(("positions", "block"), [(2 * MAX_POSITIONS, MOST_AT_ONCE), (2 * MOST_AT_ONCE, 2 * MOST_AT_ONCE)])
def test_attention_over_more_positions_or_more_at_once_may_leave(positions: int, block: int):
    with pytest.raises(Leaves):
        attended(positions, block)


# --- Controls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("added", "y, x + y))", "y, x + y + y))"),
        ("cached", ".max(-1), 1)", ".max(-1), 0)"),
        ("cached", "127 << 22", "128 << 22"),
        ("gated", "2**30)", "2**31 - 1)"),
        ("gelu_exponent", "(x, 4)", "(x, 1)"),
        ("soft_capped", "<< 15, 2**15 + p", "<< 17, 2**15 + p"),
        ("normed", "(squares & 0xFFFF)", "squares"),
    ],
)
def test_control_of_function_with_a_falsified_line_leaves(function: str, old: str, new: str):
    """A quotient too large, a product of 32 bits, a sum of squares in one word, a division by 0."""
    copy = falsified(integer, function, old, new)
    for name in ("rounded_shift", "scaled", "narrowed", "_high_word", "inverse_root"):
        setattr(copy, name, getattr(integer, name))
    given = {
        "added": (fixed(4), fixed(4)),
        "cached": (fixed(4, H), (Activations(array(4, H), array(4), array(4)), Activations(UP_TO_14, MANTISSA, EXPONENT))),
        "gated": (fixed(4, WIDE), fixed(4, WIDE)),
        "gelu_exponent": ((array(4), Interval(0, LIMIT)),),
        "soft_capped": (fixed(4),),
        "normed": (fixed(4, D), (Scale(array(D), array()), Scale(Interval(-(2**14), 2**14), Interval(-100, 200)))),
    }[function]
    last = {"normed": (1,), "soft_capped": (SCORE.cap,)}.get(function, ())

    def fn(*args: Any) -> Any:
        return getattr(copy, function)(*args, *last)

    with pytest.raises(Leaves):
        bounds_of(fn, *given)
