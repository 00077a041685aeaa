"""Attention of integer models over pages is that of the definition over whole texts, in blocks of any length."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import KV, Int8Pages
from detspec.integer import spec
from detspec.integer.spec import LIMIT, LOST, MAX_POSITIONS, Activations, Cached, Sizes, SoftCap
from detspec.ops import integer_cpu, integer_pages
from detspec.ops.integer_pages import PLAIN, PageLayout, ScoreScale
from tests.integer.falsified import falsified

N, K, H, PAGE, S = 4, 2, 16, 8, 40
SCORE = (23_637, -16)  # log2(e) / 4, about: mantissa and exponent
CAP = SoftCap(8 << 16, 16_384, -16)  # of scores up to some hundred
PAGES = 1 + S // PAGE
# Rows of two windows: where they look from, the places of a text. The last one pads the pass.
LOOKING_FROM = np.asarray([[0, 1, 7, 8], [20, 38, 39, -1]])


def cached(rng: np.random.Generator) -> Cached:
    """Keys or values of a text; those at place 20 have left their range."""
    exponent = rng.integers(-40, -20, (S, K))
    exponent[20] = LOST
    return Cached(rng.integers(-127, 128, (S, K, H)), rng.integers(2**13, 33_026, (S, K)), exponent)


def paged(given: Cached, table: np.ndarray) -> Int8Pages:
    """Keys or values in the pages of a table; the other pages hold anything."""
    values = np.full((PAGES, K, PAGE, H), 77, np.int8)
    scale = np.full((PAGES, K, PAGE), (LOST << 16) + 9_999, np.int32)
    for number, page in enumerate(table):
        places = slice(number * PAGE, (number + 1) * PAGE)
        values[page] = np.moveaxis(given.values[places], 0, 1)
        scale[page] = np.moveaxis((given.exponent[places] << 16) | given.mantissa[places], 0, 1)
    return Int8Pages(jnp.asarray(values), jnp.asarray(scale))


def both(module: ModuleType, window: int | None, cap: SoftCap | None = None, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention of all rows but the padding, by a module and by the definition."""
    rng = np.random.default_rng(3)
    keys = cached(rng)
    values = cached(rng)
    values = values._replace(exponent=np.where(values.exponent == LOST, -30, values.exponent))
    q = Activations(
        rng.integers(-(2**14) + 1, 2**14, (8, N, H)), rng.integers(2**14, 2**15 + 1, (8, N)), rng.integers(-28, -22, (8, N))
    )
    q = q._replace(exponent=np.where(np.arange(8)[:, None] == 1, LOST, q.exponent))
    table = 1 + rng.permutation(S // PAGE)
    tables = jnp.asarray(np.stack([table] * 2), jnp.int32)
    looking_from = jnp.asarray(LOOKING_FROM, jnp.int32)

    def run(q: Activations, k: Any, v: Any) -> jax.Array:
        if more.get("layout", PLAIN).value_slot_axis == 3:
            v = v.replace(values=v.values.swapaxes(2, 3))
        return module.attended(q, KV(k, v), tables, looking_from, score=ScoreScale(*SCORE, cap), window=window, **more)

    narrow = Activations(*(jnp.asarray(x, jnp.int32) for x in q))
    found = jax.jit(run)(narrow, paged(keys, table), paged(values, table))
    shape = Sizes(N, K, *SCORE, 0, (), (), score_cap=cap)
    place = np.arange(S)[None]
    looking = LOOKING_FROM.reshape(-1, 1)[:7]
    visible = (place <= looking) & (place > looking - (window or S))
    expected = spec.attended(Activations(*(x[:7] for x in q)), keys, values, visible, shape)
    return np.asarray(found)[:7], expected


@pytest.mark.parametrize(("block", "window"), [(8, None), (24, 5), (256, None)])
@pytest.mark.parametrize("value_slot_axis", [2, 3])
def test_attention_over_pages_is_that_of_the_definition(block: int, window: int | None, value_slot_axis: int):
    found, expected = both(integer_pages, window, layout=PageLayout(block, value_slot_axis, by_words=value_slot_axis == 3))
    assert (found == expected).all()
    # A lost query, and rows that see the lost key: with a window of 5 only the first.
    lost = (expected == LIMIT).all((1, 2))
    assert lost.tolist() == [False, True, False, False, True, window is None, window is None]


@pytest.mark.parametrize("window", [None, 5])
def test_attention_by_the_kernel_is_that_of_the_definition(window: int | None, cpu_kernels: None):
    found, expected = both(integer_cpu, window)
    assert (found == expected).all()


@pytest.mark.parametrize("cap", [CAP, SoftCap(2**28, 30_000, -20), SoftCap(1 << 12, 17_000, 2)])
def test_attention_with_capped_scores_is_that_of_the_definition(cap: SoftCap, cpu_kernels: None):
    uncapped, _ = both(integer_pages, None)
    for module in (integer_pages, integer_cpu):
        found, expected = both(module, None, cap)
        assert (found == expected).all(), module
        assert (found != uncapped).any(), "the control: no cap"


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("quotients", "fall - sums.highest - 10", "fall - sums.highest - 9"),
        pytest.param("quotients", "(sums.of_values.low + 128) >> 8", "sums.of_values.low >> 8", marks=pytest.mark.slow),
        pytest.param("attended", "visible & lost", "visible & False", marks=pytest.mark.slow),
        pytest.param("quotients", " + sums.of_all.low, fall)", ", fall)", marks=pytest.mark.slow),
        pytest.param("is_visible", "place <= looking_from", "place < looking_from", marks=pytest.mark.slow),
        pytest.param("weights_of", "- values.exponent, 15, 31", "- values.exponent, 16, 31", marks=pytest.mark.slow),
    ],
)
def test_control_of_attention_with_a_falsified_line_is_found(function: str, old: str, new: str):
    module = falsified(integer_pages, function, old, new)
    found, expected = both(module, None)
    assert (found != expected).any()


def of_long_text(module: ModuleType) -> tuple[np.ndarray, np.ndarray]:
    """Attention of the last token of the longest text by a module and by the definition; all scores are equal.

    The lower words of the weights, and probabilities, are as large as can be: their sums are 2**32 and more.
    """
    page = 512
    values = np.where(np.arange(MAX_POSITIONS)[:, None, None] < MAX_POSITIONS - 7, 127, -127) * np.ones((1, 1, 8), np.int64)
    keys = Cached(np.ones_like(values), np.full((MAX_POSITIONS, 1), 2**14), np.full((MAX_POSITIONS, 1), -30))
    values = Cached(values, np.full((MAX_POSITIONS, 1), 16_511), np.full((MAX_POSITIONS, 1), -30))
    q = Activations(np.full((1, 1, 8), 9), np.full((1, 1), 2**14), np.full((1, 1), -20))

    def paged(given: Cached) -> Int8Pages:
        numbers = jnp.asarray(given.values.reshape(-1, 1, page, 8), jnp.int8)
        return Int8Pages(numbers, jnp.asarray((given.exponent << 16) | given.mantissa, jnp.int32).reshape(-1, 1, page))

    tables = jnp.arange(MAX_POSITIONS // page, dtype=jnp.int32)[None]
    narrow = Activations(*(jnp.asarray(x, jnp.int32) for x in q))
    last = jnp.full((1, 1), MAX_POSITIONS - 1, jnp.int32)
    found = module.attended(narrow, KV(paged(keys), paged(values)), tables, last, score=ScoreScale(*SCORE), window=None)
    expected = spec.attended(q, keys, values, np.ones((1, MAX_POSITIONS), bool), Sizes(1, 1, *SCORE, 0, (), ()))
    return np.asarray(found), expected


def test_attention_over_the_longest_text_is_that_of_the_definition(cpu_kernels: None):
    for module in (integer_pages, integer_cpu):
        found, expected = of_long_text(module)
        assert (found == expected).all(), module
    assert 0 < np.abs(expected).max() < LIMIT


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("carried", "high + (low >> 8), low & 0xFF", "high, low"),
        ("quotients", "fall > 8, of_many, of_few", "fall > 8, of_few, of_few"),
    ],
)
def test_control_of_attention_over_the_longest_text_without_carries_is_found(function: str, old: str, new: str):
    found, expected = of_long_text(falsified(integer_pages, function, old, new))
    assert (found != expected).any()
