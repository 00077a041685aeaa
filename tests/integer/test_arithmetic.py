"""Each function of detspec.ops.integer and detspec.ops.integer_choices is its namesake of the definition, in numpy.

Its inputs have the extremes: 0, +-1, +-LIMIT, rows of zeros, rows that have left their range, the largest shifts. Each function
has controls, copies of its module with a piece of one line falsified, in which the same inputs find a difference.
"""

import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import spec
from detspec.integer.spec import LIMIT, LOST, MAX_POSITIONS, Activations, IntMatrix, Scale, SoftCap, Wishes
from detspec.ops import integer, integer_choices
from tests.integer.falsified import falsified

Rng = np.random.Generator
NUM = 4_000  # numbers
ROWS, WIDTH = 150, 64  # rows of numbers
V = 300  # tokens
LARGE_V = spec.SMALL_VOCABULARY + 80
STEPS = (*map(int, np.random.default_rng(5).integers(0, 2**46, 32)), 0, 1, 2**48 // 7)
OldNew = tuple[str, str, str]


# --- Inputs ------------------------------------------------------------------------------------------------------------------


def numbers(rng: Rng, *shape: int, most: int = LIMIT) -> np.ndarray:
    """Numbers of all sizes up to `most`, with the extremes among them."""
    found = rng.integers(-most, most + 1, shape) >> rng.integers(0, 31, shape)
    extremes = np.asarray([0, 1, -1, most, -most, most - 1, 1 - most, 2**15, -(2**15), 2**16 - 1, -(2**16)])
    found.reshape(-1)[: len(extremes)] = np.clip(extremes, -most, most)
    return found


def grid() -> tuple[np.ndarray, ...]:
    """Numbers, factors and shifts of all extremes."""
    x = (0, 1, -1, LIMIT, -LIMIT, LIMIT - 1, 2**16, -(2**16) - 1)
    return tuple(each.reshape(-1) for each in np.meshgrid(x, (0, 1, 2**14, 2**15, 2**16 - 1, 2**16), range(-20, 55)))


def rows(rng: Rng, n: int = WIDTH) -> np.ndarray:
    """Rows `[ROWS, n]`: some of zeros, some of one number, some lost, others of all sizes."""
    found = rng.integers(-LIMIT + 1, LIMIT, (ROWS, n)) >> rng.integers(0, 31, (ROWS, 1)) >> rng.integers(0, 4, (ROWS, n))
    found[0:3] = 0
    found[3] = LIMIT
    found[4] = -LIMIT
    found[5, 2] = LIMIT
    found[6, 3] = -LIMIT
    found[7] = LIMIT - 1
    found[8] = 0
    found[8, 5] = 1
    found[9] = 2**15 - 1
    found[10] = -1
    return found


def activations(rng: Rng, n: int = WIDTH) -> Activations:
    row = spec.row_of(rows(rng, n), -16)
    return row._replace(mantissa=rng.integers(2**14, 2**15 + 1, ROWS))


def spread_activations(rng: Rng) -> Activations:
    """Rows of up to 29 bits, as the largest block gives them."""
    row = activations(rng)
    return row._replace(values=row.values * rng.choice([1, 2**9, 2**15], (ROWS, 1)))


def rows_of_all_scales(rng: Rng, row: Activations) -> Activations:
    """`row` with other exponents; LOST where it has left its range."""
    return row._replace(exponent=np.where(spec.is_lost(row.exponent), row.exponent, rng.integers(-70, 20, ROWS)))


def matrix(rng: Rng) -> IntMatrix:
    values = rng.integers(-127, 128, (48, WIDTH)).astype(np.int8)
    values[0] = 127
    values[1] = -127
    values[2] = 0
    return IntMatrix(values, rng.integers(2**14, 2**15 + 1, 48), rng.integers(-40, 20, 48))


def scale(rng: Rng) -> Scale:
    return Scale(np.append(rng.integers(-(2**14), 2**14 + 1, WIDTH - 2), [2**14, -(2**14)]), np.asarray(-11))


def unsigned(rng: Rng, *shape: int) -> np.ndarray:
    """Numbers of 1 .. 2**32 - 1 of all sizes."""
    found = np.maximum(rng.integers(1, 2**32, shape) >> rng.integers(0, 32, shape), 1)
    found.reshape(-1)[:6] = 1, 2, 3, 2**32 - 1, 2**31, 2**31 - 1
    return found.astype(np.uint32)


def logits(rng: Rng) -> np.ndarray:
    """Rows `[ROWS, V]` of logits: peaked, flat, all equal, at the ends of the range, lost."""
    found = (rng.normal(size=(ROWS, V)) * 2.0 ** rng.uniform(8, 22, (ROWS, 1))).astype(np.int64)
    found[0] = 0
    found[1] = -LIMIT
    found[2, :3] = LIMIT - 1
    found[2, 3:] = -LIMIT
    found[3, 7] = LIMIT
    found[4] = LIMIT
    found[5, ::2] = -LIMIT
    found[6] = found[6] // 65_536 * 65_536  # ties
    return found


def large_vocabulary(rng: Rng) -> np.ndarray:
    """Rows `[4, LARGE_V]` of logits: all equal, flat, peaked, two sizes."""
    found = (rng.normal(size=(4, LARGE_V)) * np.asarray([[0], [2**13], [2**17], [1]])).astype(np.int64)
    found[3, ::2] -= 2**20
    return found


def floats(rng: Rng, *shape: int) -> np.ndarray:
    found = (rng.normal(size=shape) * 10.0 ** rng.uniform(-9, 9, shape)).astype(np.float32)
    found.reshape(-1)[:8] = 0, 1, -1, 0.5, 1.5 * 2**-17, 2**-17, 100, -100
    return found


def chosen_of(rng: Rng, *values: float) -> np.ndarray:
    return rng.choice(np.asarray(values, np.float32), ROWS)


def wishes(rng: Rng) -> Wishes:
    return Wishes(
        temperature=chosen_of(rng, 0, 1, 0.8, 0.3, 1.7, 1e-30, 1e6),
        top_k=rng.choice([0, 1, 5, V - 1, V, 5000], ROWS),
        top_p=chosen_of(rng, 1, 0.9, 0.5, 0.01, 1e-7, 0.99999),
        min_p=chosen_of(rng, 0, 0.1, 0.001, 1, 1e-30, 0.7),
        seed=rng.integers(0, 2**32, ROWS).astype(np.uint32),
    )


class Penalties(NamedTuple):
    repetition_penalty: np.ndarray
    frequency_penalty: np.ndarray
    presence_penalty: np.ndarray


def penalties(rng: Rng) -> tuple[Any, ...]:
    count = np.where(rng.random((ROWS, V)) < 0.1, rng.integers(0, 5, (ROWS, V)), 0)
    count[2, :2] = MAX_POSITIONS
    asked = Penalties(
        chosen_of(rng, 1, 1.3, 0.7, 1e-6, 1e6), chosen_of(rng, 0, 0.5, -1.2, 2, -2, 1e-9), chosen_of(rng, 0, 0.5, -2, 2, 1e-30)
    )
    return logits(rng), (rng.random((ROWS, V)) < 0.2) | (count > 0), count, asked


def squares(rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Sums of up to 46 bits in two words, at least 1."""
    total = np.maximum(rng.integers(1, 2**46, NUM) >> rng.integers(0, 46, NUM), 1)
    total[:6] = 1, 2, 2**46 - 1, 2**16, 2**16 - 1, 2**32
    return (total >> 16).astype(np.uint32), (total & 0xFFFF).astype(np.uint32)


# --- Cases -------------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function, as the definition has it and as a module in JAX has it, on the same inputs."""

    module: ModuleType
    oracle: Callable[..., Any]
    tested: Callable[[Any], Callable[..., Any]]  # the function of a module, or of a falsified copy of it
    inputs: Callable[[Rng], tuple[Any, ...]]
    controls: tuple[OldNew, ...]  # a function, a piece of it and what the control has in its place


def plainly(
    module: ModuleType, name: str, inputs: Callable[[Rng], tuple[Any, ...]], *controls: tuple[str, str], fixed: Any = ()
) -> Case:
    """A case of a function that takes in both what the other takes; `fixed` are Python's values, after the arrays."""
    return Case(
        module,
        lambda *args: getattr(spec, name)(*args, *fixed),
        lambda copy: lambda *args: getattr(copy, name)(*args, *fixed),
        inputs,
        tuple((name, *control) for control in controls),
    )


CASES = {
    "rounded_shift": plainly(
        integer,
        "rounded_shift",
        lambda rng: (numbers(rng, NUM), rng.integers(0, 70, NUM)),
        ("& 1, 0)", "& 0, 0)"),
        ("I32), 31)", "I32), 30)"),
    ),
    "scaled": plainly(
        integer,
        "scaled",
        lambda rng: tuple(
            map(np.append, grid(), (numbers(rng, NUM), numbers(rng, NUM, most=2**15) + 2**15, rng.integers(-20, 55, NUM)))
        ),
        (" + (of_low >> 16).astype(I32)", ""),
        ("half & 1", "half & 0"),
        ("r > 16, high", "r > 17, high"),
        ("of_high | jnp.where(r >= 16, 0, below)", "of_high"),
        ("jnp.where(fits, jnp", "jnp.where(fits | True, jnp"),
        ("jnp.where(high < 0, -LIMIT, LIMIT)", "LIMIT"),
        ("-15, 47)", "-14, 47)"),
        ("-15, 47)", "-15, 46)"),
    ),
    "scaled, of all int32": plainly(
        integer,
        "scaled",
        lambda rng: (numbers(rng, NUM, most=2**31 - 1), numbers(rng, NUM, most=2**15) + 2**15, rng.integers(0, 47, NUM)),
    ),
    "bit_length": plainly(integer, "bit_length", lambda rng: (np.abs(numbers(rng, NUM)),), ("32 -", "31 -")),
    "bit_length, unsigned": plainly(integer, "bit_length", lambda rng: (unsigned(rng, NUM),)),
    "split": Case(
        integer,
        lambda x: ((x + 128) // 256, x - (x + 128) // 256 * 256),
        lambda copy: lambda x: copy.split(x),
        lambda rng: (np.arange(-(2**14), 2**14 + 300),),
        (("split", "x + 128", "x + 127"),),
    ),
    "absolute": Case(
        integer,
        np.abs,
        lambda copy: lambda x: copy.absolute(x).astype(jnp.int32),
        lambda rng: (numbers(rng, NUM, most=2**31 - 1),),
        (("absolute", "jnp.abs(x)", "jnp.maximum(x, 0)"),),
    ),
    "narrowed": plainly(
        integer,
        "narrowed",
        lambda rng: (rows(rng),),
        (">= LIMIT", "> LIMIT"),
        ("-most, most", "-most, most + 1"),
        ("- bits, 0)", "- bits, 1)"),
        fixed=(14,),
    ),
    "row_of": plainly(integer, "row_of", lambda rng: (rows(rng),), ("exponent - 14", "exponent - 13"), fixed=(-16,)),
    "cached": plainly(
        integer,
        "cached",
        lambda rng: (rows(rng), activations(rng)),
        ("16_513, 14", "16_512, 14"),
        (".max(-1), 1)", ".max(-1), 2)"),
        ("- 7 + 15", "- 8 + 15"),
        ("row.exponent, LOST)", "row.exponent, 2 * LOST)"),
        ("127 << 22", "126 << 22"),
    ),
    "is_lost": plainly(
        integer, "is_lost", lambda rng: (np.asarray([0, -30, LOST, LOST // 2, LOST // 2 + 1, LOST - 50]),), ("// 2", "")
    ),
    "added": plainly(
        integer,
        "added",
        lambda rng: (rows(rng), rows(rng)[rng.permutation(ROWS)]),
        ("LIMIT, x, ", "LIMIT, x + y, "),
        ("LIMIT, y, ", "LIMIT, x + y, "),
        ("-LIMIT, LIMIT)", "-LIMIT - 1, LIMIT + 1)"),
    ),
    "dot": Case(
        integer,
        lambda values, other: spec.dot(values.astype(np.int64), other.T.astype(np.int64)),
        lambda copy: copy.dot,
        lambda rng: (np.full((1, 131_072), -128, np.int8), np.full((3, 131_072), 127, np.int8)),
        (("dot", "preferred_element_type=I32", "preferred_element_type=jnp.int16"),),
    ),
    "product": Case(
        integer,
        spec.product,
        lambda copy: copy.product,
        lambda rng: (activations(rng), matrix(rng), numbers(rng, 48)),
        (
            ("of_sums", "+ 128) >> 8", "+ 127) >> 8"),
            ("of_sums", "15 + dropped + FRACTION", "15 + 7 + FRACTION"),
            ("of_sums", "[..., None], LIMIT, y)", "[..., None], y, y)"),
            ("of_sums", "matrix.mantissa), 15)", "matrix.mantissa), 16)"),
        ),
    ),
    "product, 8 bits": Case(
        integer,
        lambda *given: spec.product(*given, bits=8),
        lambda copy: lambda *given: copy.product(*given, bits=8),
        lambda rng: (spread_activations(rng), matrix(rng), numbers(rng, 48)),
        (
            ("of_sums", "dropped = 0", "dropped = 1"),
            ("product", "bits=bits", "bits=15"),
            ("in_words", "cached(row.values, row)", "cached(row.values >> 1, row)"),
        ),
    ),
    "products": Case(
        integer,
        lambda row, first, second: [spec.product(row, each, bits=8) for each in (first, second)],
        lambda copy: lambda *given: copy.products(*given, bits=8),
        lambda rng: (activations(rng), matrix(rng), matrix(rng)),
        (("products", "in matrices", "in matrices[::-1]"),),
    ),
    "in_words": Case(
        integer,
        lambda row: (spec.cached(row.values, row), spec.cached(row.values, row).values),
        lambda copy: lambda row: copy.in_words(row, 8),
        lambda rng: (spread_activations(rng),),
        (("in_words", "cached(row.values, row)", "cached(row.values >> 1, row)"),),
    ),
    "in_words, 15 bits": Case(
        integer,
        lambda row: (row, np.concatenate([(row.values + 128) >> 8, (row.values + 128) % 256 - 128])),
        lambda copy: lambda row: copy.in_words(row, 15),
        lambda rng: (activations(rng),),
        (("split", "x + 128", "x + 127"),),
    ),
    "hadamard": plainly(
        integer,
        "hadamard",
        lambda rng: (numbers(rng, 5, 3, 768, most=2**14),),
        ("first - second", "second - first"),
        ("odd, -1, 1", "odd, 1, -1"),
        ("block_of(x.shape[-1])", "block_of(x.shape[-1]) // 2"),
    ),
    "hadamard, an odd width": plainly(integer, "hadamard", lambda rng: (numbers(rng, 5, 33, most=2**14),)),
    "spread": plainly(integer, "spread", lambda rng: (activations(rng),), ("hadamard(row.values)", "row.values")),
    "inverse_root": Case(
        integer,
        lambda high, low: spec.inverse_root((high << 16) | low),
        lambda copy: copy.inverse_root,
        lambda rng: squares(rng),
        (
            ("inverse_root", "range(2)", "range(1)"),
            ("inverse_root", "(bits - 31)", "(bits - 30)"),
            ("inverse_root", " | (low >> jnp.minimum(down, 31))", ""),
            ("_high_word", " + (second >> 16)", ""),
            ("_high_word", "(first & 0xFFFF)", "0"),
        ),
    ),
    "normed": plainly(
        integer,
        "normed",
        lambda rng: (rows(rng), scale(rng)),
        (" + (low >> 16)", ""),
        ("LOST, exponent", "exponent, exponent"),
        ("2 * shift", "shift"),
        ("14 - 30", "14 - 29"),
        fixed=(42_950,),
    ),
    "normed, small numbers and no epsilon": plainly(
        integer,
        "normed",
        lambda rng: (rng.integers(-3, 4, (ROWS, WIDTH)) >> rng.integers(0, 2, (ROWS, 1)), scale(rng)),
        fixed=(1,),
    ),
    "turned_by": plainly(
        integer,
        "turned_by",
        lambda rng: (np.append(rng.integers(0, MAX_POSITIONS, 300), [0, 1, MAX_POSITIONS - 1, 65_535, 65_536]),),
        ("(place >> 16) * low + ", ""),
        ("& 0xFFFF) * low) >> 16", "& 0xFFFF) * low) >> 15"),
        fixed=(STEPS,),
    ),
    "sine": plainly(
        integer,
        "sine",
        lambda rng: (unsigned(rng, NUM),),
        ("place + 1", "place"),
        (">> 6) & 0xFFFF", ">> 6) & 0xFF00"),
        ("16), 6)", "16), 5)"),
    ),
    "rotated": Case(
        integer,
        lambda row, turns: spec.rotated(row, turns),
        lambda copy: (
            lambda row, turns: copy.rotated(row, copy.sine(turns)[:, None], copy.sine(turns + jnp.uint32(2**30))[:, None])
        ),
        lambda rng: (
            Activations(*(x.reshape(ROWS // 3, 3, *x.shape[1:]) for x in activations(rng))),
            unsigned(rng, ROWS // 3, WIDTH // 2),
        ),
        (("rotated", "first * cos - second", "first * cos + second"), ("rotated", "+ first * sin", "- first * sin")),
    ),
    "power": plainly(
        integer,
        "power",
        lambda rng: (np.abs(numbers(rng, NUM, most=2**31 - 1)),),
        ("16, 31)", "16, 30)"),
        (">> 16) + coefficient", ">> 15) + coefficient"),
    ),
    "gated": plainly(
        integer,
        "gated",
        lambda rng: (rows(rng), rows(rng)[rng.permutation(ROWS)]),
        ("2**30)", "2**30 - 1)"),
        ("2**15 - share)", "share)"),
        ("(absolute(gate) >= LIMIT).any(-1) | is", "is"),
        (" | is_lost(of_second)", ""),
        ("- 2 * FRACTION", "- FRACTION"),
        ("2**26", "2**18"),
    ),
    "gelu_exponent": plainly(
        integer,
        "gelu_exponent",
        lambda rng: (np.append(np.arange(spec.GELU_MOST + 2), [LIMIT, LIMIT - 1]),),
        ("GELU_MOST)", "GELU_MOST - 2**16)"),
        ("(x, 4)", "(x, 5)"),
        ("root, 12)", "root, 12) + 1"),
        ("GELU[1], 16)", "(GELU[1] + 1), 16)"),
    ),
    "soft_capped": plainly(
        integer,
        "soft_capped",
        lambda rng: (np.append(np.arange(-(2**21), 2**21, 97), numbers(rng, NUM)),),
        ("2**15 - p", "2**15 - p - 1"),
        ("tanh, 15", "tanh, 14"),
        ("LIMIT, x", "LIMIT, found"),
        ("-found, found", "found, found"),
        ("-cap.exponent", "1 - cap.exponent"),
        fixed=(SoftCap(30 << 16, 25_213, -18),),
    ),
    "soft_capped, of large caps": plainly(
        integer,
        "soft_capped",
        lambda rng: (numbers(rng, NUM),),
        ("absolute(x)", "jnp.minimum(absolute(x), 2**26)"),
        fixed=(SoftCap(2**28, 23_637, -26),),
    ),
    "gated, gelu_tanh": plainly(
        integer,
        "gated",
        lambda rng: (rows(rng), rows(rng)[rng.permutation(ROWS)]),
        ('activation == "gelu_tanh"', 'activation == "silu"'),
        ("(absolute(gate) >= LIMIT).any(-1) | is", "is"),
        fixed=("gelu_tanh",),
    ),
    "as_fixed": plainly(
        integer,
        "as_fixed",
        lambda rng: (rows_of_all_scales(rng, activations(rng)),),
        ("+ FRACTION", "+ FRACTION - 1"),
        ("LIMIT, y)", "y, y)"),
    ),
    "as_fixed, of spread rows": plainly(
        integer, "as_fixed", lambda rng: (rows_of_all_scales(rng, spread_activations(rng)),), ("LIMIT, y)", "-LIMIT, y)")
    ),
    "log2": Case(
        integer_choices,
        spec.log2,
        lambda copy: copy.log2,
        lambda rng: (unsigned(rng, NUM),),
        (("log2", "(4096 - x)", "(4095 - x)"), ("log2", ">> 10), 14)", ">> 10), 13)")),
    ),
    "arc_at": Case(
        integer_choices,
        lambda place: (spec.LOGS[place], np.diff(spec.LOGS)[place], spec.BEND // (256 + place) ** 2),
        lambda copy: copy.arc_at,
        lambda rng: (np.arange(256),),
        (("arc_at", "(256 + place) * (256 + place)", "(256 + place) * (257 + place)"), ("arc_at", "place + 1", "place")),
    ),
    "natural": Case(
        integer_choices,
        spec.natural,
        lambda copy: lambda log: copy.natural(integer_choices.Log2(log >> 26, log & (2**26 - 1))),
        lambda rng: (rng.integers(-(2**30), 2**31 - 2**26, NUM),),
        (("natural", "rounded_shift(log.part, 8)", "(log.part >> 8)"), ("natural", "LN_2, 17", "LN_2 + 1, 17")),
    ),
    "weights_of": plainly(
        integer_choices,
        "weights_of",
        lambda rng: (np.append(np.abs(numbers(rng, NUM)), [2**26, 2**31 - 1, 20 * 2**16]),),
        ("2**26", "2**20"),
        ("bits - 15", "bits - 16"),
    ),
    "weights_of, of a large vocabulary": plainly(
        integer_choices, "weights_of", lambda rng: (np.abs(numbers(rng, NUM)),), ("bits - 15", "13"), fixed=(26,)
    ),
    "logprobs, of a large vocabulary": plainly(
        integer_choices,
        "logprobs",
        lambda rng: (large_vocabulary(rng), rng.integers(0, LARGE_V, 4)),
        ("whole - bits", "whole - 28"),
    ),
    "summed": Case(
        integer_choices,
        lambda x: (lambda total: (total >> 14, total & (2**14 - 1)))(x.sum(-1)),
        lambda copy: lambda x: tuple(copy.summed(x, 26, lambda part: part.sum(-1, dtype=jnp.uint32))),
        lambda rng: (np.stack([np.full(LARGE_V, 2**26), rng.integers(0, 2**26, LARGE_V), np.zeros(LARGE_V, np.int64)]),),
        (("summed", " + (low >> 13)", ""), ("summed", "high >> 1,", "high,"), ("summed", "(high & 1) << 13", "0")),
    ),
    "kept_from, of a large vocabulary": Case(
        integer_choices,
        lambda below, asked: spec.kept(below, asked),
        lambda copy: lambda below, asked: below >= copy.kept_from(below, asked)[:, None],
        lambda rng: (
            spec.tempered(large_vocabulary(rng), np.float32([1, 1, 0.8, 1.7])),
            Wishes(*(np.asarray(x) for x in ((1.0,) * 4, (0,) * 4, (0.5, 0.9, 0.95, 0.3), (0.0,) * 4, (0,) * 4))),
        ),
        (("summed", " + (low >> 13)", ""),),
    ),
    "logprobs": plainly(
        integer_choices,
        "logprobs",
        lambda rng: (logits(rng), rng.integers(0, V, ROWS)),
        ("whole - bits", "whole - 27"),
        ("SMALLEST_LOGPROB)", "2 * SMALLEST_LOGPROB)"),
    ),
    "as_float32": Case(
        integer_choices,
        lambda x: (x / 65_536).astype(np.float32).view(np.int32),
        lambda copy: lambda x: jax.lax.bitcast_convert_type(copy.as_float32(x), jnp.int32),
        lambda rng: (numbers(rng, NUM, most=2**24),),
        (("as_float32", "+ 127", "+ 126"), ("as_float32", "size == 0", "size == 1"), ("as_float32", "-(2**31)", "2**30")),
    ),
    "gumbel": Case(
        integer_choices,
        lambda *given: spec.gumbel(*given, V),
        lambda copy: lambda *given: copy.gumbel(*given, V),
        lambda rng: (unsigned(rng, ROWS), rng.integers(0, MAX_POSITIONS, ROWS)),
        (("gumbel", "x ^ y", "x"),),
    ),
    "noise_key": Case(
        integer_choices,
        lambda seed, position: spec.threefry((np.int64(0), np.asarray(seed, np.int64)), (np.int64(0), position)),
        lambda copy: copy.noise_key,
        lambda rng: (unsigned(rng, ROWS), rng.integers(0, MAX_POSITIONS, ROWS)),
        (("noise_key", "(zero, seed", "(zero + 1, seed"),),
    ),
    "gumbel_of": Case(
        integer_choices,
        lambda bits: spec.GUMBEL_SHIFT - spec.natural(_log_of_waiting(np.asarray(bits, np.int64) | 1)),
        lambda copy: copy.gumbel_of,
        lambda rng: (np.append(unsigned(rng, NUM), np.uint32([0, 1, 2**32 - 1])),),
        (
            ("gumbel_of", "GUMBEL_SHIFT -", "GUMBEL_SHIFT + 1 -"),
            ("gumbel_of", "U32(32)", "U32(31)"),
            ("gumbel_of", "log.whole - 26", "log.whole - 25"),
        ),
    ),
    "number": plainly(
        integer_choices,
        "number",
        lambda rng: (np.abs(floats(rng, NUM)) + np.float32(1e-30),),
        ("rounded_shift(mantissa, 8)", "(mantissa >> 8)"),
        ("126 - 16", "127 - 16"),
    ),
    "fixed": plainly(
        integer_choices,
        "fixed",
        lambda rng: (floats(rng, NUM),),
        ("exponent - 126", "exponent - 127"),
        ("bits < 0, -mantissa", "bits < 0, mantissa"),
    ),
    "tempered": plainly(
        integer_choices,
        "tempered",
        lambda rng: (logits(rng), wishes(rng).temperature),
        ("2**30)", "2**30 - 1)"),
        ("30 + e", "31 + e"),
        (">= LIMIT, LIMIT, found", ">= LIMIT, found, found"),
        ("-LIMIT, -LIMIT, found", "-LIMIT, found, found"),
    ),
    "is_positive": Case(
        integer_choices,
        lambda x: x > 0,
        lambda copy: copy.is_positive,
        lambda rng: (np.append(floats(rng, NUM), np.float32([0, -0.0, 1e-38, -1e-38])),),
        (("is_positive", "> 0", ">= 0"), ("is_positive", "> 0", "!= 0")),
    ),
    "is_filtered": Case(
        integer_choices,
        lambda asked: (asked.temperature > 0) & ((asked.top_k > 0) | (asked.top_p < 1) | (asked.min_p > 0)),
        lambda copy: copy.is_filtered,
        lambda rng: (wishes(rng),),
        (("is_filtered", "< ONE", "< 0"), ("is_filtered", "is_positive(asked.temperature) & ", "")),
    ),
    "has_penalties": Case(
        integer_choices,
        lambda asked: (asked[0] != 1) | (asked[1] != 0) | (asked[2] != 0),
        lambda copy: copy.has_penalties,
        lambda rng: (Penalties(chosen_of(rng, 1, 1, 0.5), chosen_of(rng, 0, 0, 0.5), chosen_of(rng, 0, 0, -2)),),
        (("has_penalties", "repetition != ONE", "repetition != 0"), ("has_penalties", " | (others[1] != 0)", "")),
    ),
    "kept_from": Case(
        integer_choices,
        lambda below, asked: spec.kept(below, asked),
        lambda copy: lambda below, asked: below >= copy.kept_from(below, asked)[:, None],
        lambda rng: (spec.tempered(logits(rng), (asked := wishes(rng)).temperature), asked),
        (
            ("kept_from", "asked.top_k - 1", "asked.top_k"),
            ("kept_from", "asked.top_k > 0", "asked.top_k > 1"),
            ("kept_from", "< 2**FRACTION", "< 2**15"),
            ("kept_from", "is_likely.sum(-1, dtype=I32) - 1, 0)", "is_likely.sum(-1, dtype=I32) - 1, 1)"),
            ("kept_from", "filtered & is_positive(asked.min_p)", "is_positive(asked.min_p)"),
            ("kept_from", "up=1", "up=0"),
            ("_times", "limb * factor + carry", "limb * factor"),
            ("_is_less", "(one == other) & found", "False"),
            ("_limbs", "total.high & 3", "total.high & 1"),
            ("carried", "high + (low >> WORD)", "high"),
        ),
    ),
    "words": Case(
        integer_choices,
        lambda x: (x >> 14, x & (2**14 - 1)),
        lambda copy: lambda x: tuple(copy.words(x)),
        lambda rng: (np.abs(numbers(rng, NUM, most=2**28)),),
        (("words", "2**WORD - 1", "2**WORD - 2"),),
    ),
    "log_of": Case(
        integer_choices,
        lambda high, low: _log_of_words(high, low),
        lambda copy: lambda high, low: copy.log_of(copy.carried(high, low)),
        lambda rng: (
            np.append(unsigned(rng, NUM) >> 1, np.uint32([0, 0, 2**17, 2**18])),
            np.append(unsigned(rng, NUM) >> 1, np.uint32([1, 5, 0, 3])),
        ),
        (
            ("log_of", "WORD + bit_length(high)", "WORD - 1 + bit_length(high)"),
            ("log_of", "log.whole + fall.astype(I32)", "log.whole"),
            ("log_of", " | (low >> fall)", ""),
            ("carried", "high + (low >> WORD)", "high"),
        ),
    ),
    "biased": Case(
        integer_choices,
        lambda x, bias: spec.held(x, spec.added(x, spec.fixed(bias))),
        lambda copy: copy.biased,
        lambda rng: (numbers(rng, NUM), floats(rng, NUM)),
        (("biased", "fixed(bias)", "-fixed(bias)"),),
    ),
    "held": plainly(
        integer_choices,
        "held",
        lambda rng: (numbers(rng, NUM), numbers(rng, NUM)[::-1].copy()),
        ("LIMIT - 1)", "LIMIT)"),
        ("-LIMIT + 1", "-LIMIT"),
    ),
    "penalised": Case(
        integer_choices,
        lambda x, seen, count, asked: spec.penalised(x, seen, count, *asked),
        lambda copy: copy.penalised,
        penalties,
        (
            ("penalised", "logits > 0", "logits >= 2"),
            ("penalised", "30 + e", "29 + e"),
            ("penalised", "count > 0", "count > 1"),
            ("penalised", "-of_count", "of_count"),
            ("penalised", "held(given, ", "held(logits, "),
            ("held", "LIMIT - 1)", "LIMIT)"),
            ("_times_number", "bits < 0, -size", "bits < 0, size"),
            ("_times_number", "e + FRACTION", "e + FRACTION - 1"),
        ),
    ),
}


def _log_of_words(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    total = (high << 14) + low
    fall = np.maximum(spec.bit_length(total) - 32, 0)
    return spec.log2(total >> fall) + (fall << 26)


def _log_of_waiting(uniform: np.ndarray) -> np.ndarray:
    return spec.log2(np.maximum((32 << 26) - spec.log2(uniform), 1)) - (26 << 26)


# --- Tests -------------------------------------------------------------------------------------------------------------------


def inputs_of(name: str) -> tuple[Any, ...]:
    return CASES[name].inputs(np.random.default_rng(zlib.crc32(name.encode())))


def for_oracle(args: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(np.int64) if x.dtype == np.uint32 else x, args)


def for_jax(args: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x.astype(np.int32) if x.dtype == np.int64 else x), args)


def plain(found: Any) -> list[np.ndarray]:
    """Results as int64; a logarithm in two parts as one number."""
    if type(found).__name__ == "Log2":
        found = np.asarray(found.whole, np.int64) * 2**26 + np.asarray(found.part, np.int64)
    return [np.asarray(leaf).astype(np.int64) for leaf in jax.tree.leaves(found)]


def are_equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    assert [x.shape for x in a] == [x.shape for x in b]
    return all((x == y).all() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_function_in_jax_is_that_of_the_definition(name: str):
    case = CASES[name]
    args = inputs_of(name)
    found = jax.jit(case.tested(case.module))(*for_jax(args))
    expected = plain(case.oracle(*for_oracle(args)))
    assert are_equal(plain(found), expected), [np.argwhere(a != b)[:5] for a, b in zip(plain(found), expected, strict=True)]


def controls() -> Iterator[Any]:
    """All controls, by the name of their case; those after its first are slow tests."""
    for name, case in CASES.items():
        for index, control in enumerate(case.controls):
            yield pytest.param(name, control, marks=[pytest.mark.slow] if index else [], id=f"{name}: {control[1]}")


@pytest.mark.parametrize(("name", "control"), list(controls()))
def test_control_of_function_with_a_falsified_line_is_found(name: str, control: OldNew):
    case = CASES[name]
    args = inputs_of(name)
    copy = falsified(case.module, *control)
    found = plain(jax.jit(case.tested(copy))(*for_jax(args)))
    assert not are_equal(found, plain(case.oracle(*for_oracle(args))))


def test_every_function_of_both_modules_has_a_case():
    made_of = {"carried", "of_sums"}  # of sums, which log_of, kept_from and product show
    for module in (integer, integer_choices):
        own = {
            name
            for name, x in vars(module).items()
            if getattr(x, "__module__", "") == module.__name__ and not isinstance(x, type)
        }
        tested = {name.partition(",")[0] for name, case in CASES.items() if case.module is module}
        assert {name for name in own if not name.startswith("_")} - made_of == tested
