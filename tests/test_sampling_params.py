"""Choosing tokens: filters keep the right sets, noise has the right distribution, and a row's choice is its own."""

import dataclasses
import json
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.engine.request import Request
from detspec.errors import InputError, ParameterError
from detspec.riders.rider import Rows
from detspec.sampler import CERTAIN, process_if_asked, sample, tempered
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.schedule import Numerics
from detspec.state import NO_TOKEN, SamplingArrays
from tests.fakes import bits

NUMERICS = Numerics()
R, V = 64, 1000  # of most tests, which so share a program; a row with something to say is among others
DRAWS, KINDS = 8192, 12  # draws from one distribution, and how many different tokens it has


@partial(jax.jit, static_argnames=("numerics",))
def choose(logits, position, rows, *, numerics=NUMERICS):
    process_fn = partial(process_if_asked, (), Rows(rows, position, lambda: jnp.zeros((1, 1), jnp.int32)))
    return sample(logits, position, rows, process_fn, numerics=numerics)


def arrays_of(params) -> SamplingArrays:
    """With room for one stop token and one biased token."""
    return sampling_arrays(params, max_stop_ids=1, max_logit_bias=1)


def widened(logits_row: np.ndarray, vocab: int) -> np.ndarray:
    """`logits_row` with further tokens, which are never drawn."""
    return np.pad(logits_row, (0, vocab - len(logits_row)), constant_values=-np.inf)


def positions(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def logits_of(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def sampled(logits_row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """`DRAWS` tokens of one row's distribution, one at each position from 0 on."""
    rows = arrays_of([params] * DRAWS)
    return np.asarray(choose(np.tile(widened(logits_row, KINDS), (DRAWS, 1)), positions(DRAWS), rows)[0])


def kept_set(logits_row: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens that filters keep, worked out one after the other: min_p, then the k likeliest, then the nucleus of those."""
    x = logits_row.astype(np.float64) / params.temperature
    ranked = sorted(range(len(x)), key=lambda token: -x[token])
    kept = [token for token in ranked if math.exp(x[token] - x[ranked[0]]) >= params.min_p]
    kept = kept[: params.top_k or None]
    total = sum(math.exp(x[token] - x[ranked[0]]) for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= params.top_p * total:
            break
        nucleus.append(token)
        reached += math.exp(x[token] - x[ranked[0]])
    return set(nucleus)


# Filters --------------------------------------------------------------------------------------------------------------------

FILTERS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.2},
    {"top_k": 4, "top_p": 0.95, "temperature": 2.0},
    {"top_p": 0.8, "temperature": 0.5},
    {},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_filters_keep_exactly_the_right_tokens(changes):
    """12 tokens whose probabilities differ by a factor of 0.75: at 8192 draws the rarest kept one is missed with 1e-39."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, **changes})
    logits_row = np.random.default_rng(3).permutation(np.log(0.75) * np.arange(KINDS)).astype(np.float32)
    assert set(sampled(logits_row, params).tolist()) == kept_set(logits_row, params)


def test_filters_of_the_list_keep_different_sets():
    logits_row = (np.log(0.75) * np.arange(KINDS)).astype(np.float32)
    sizes = [len(kept_set(logits_row, SamplingParams(**{"temperature": 1.0, **changes}))) for changes in FILTERS]
    assert min(sizes) == 1
    assert max(sizes) == 12
    assert len(set(sizes)) >= 6


def test_top_p_keeps_the_token_that_reaches_p():
    """Probabilities .5 .3 .2: p = .5 is reached by the first alone, .51 needs the second, .81 all three."""
    logits_row = np.log(np.float32([0.3, 0.5, 0.2]))
    found = {p: set(sampled(logits_row, SamplingParams(temperature=1.0, top_p=p)).tolist()) for p in (0.49, 0.51, 0.81)}
    assert found == {0.49: {1}, 0.51: {0, 1}, 0.81: {0, 1, 2}}


def test_top_k_keeps_ties_with_its_last_token():
    logits_row = np.float32([1, 0, 1, -1, 1])
    assert set(sampled(logits_row, SamplingParams(temperature=1.0, top_k=2)).tolist()) == {0, 2, 4}


def test_top_k_of_one_equals_greedy():
    logits = logits_of(R, V)
    one = choose(logits, positions(R), arrays_of([SamplingParams(temperature=1.3, top_k=1, seed=s) for s in range(R)]))
    greedy = choose(logits, positions(R), arrays_of([SamplingParams()] * R))
    assert one[0].tolist() == greedy[0].tolist() == logits.argmax(-1).tolist()
    assert (bits(one[1]) == bits(greedy[1])).all()
    free = choose(logits, positions(R), arrays_of([SamplingParams(temperature=1.3, seed=s) for s in range(R)]))
    assert free[0].tolist() != greedy[0].tolist()


def test_filters_of_one_row_leave_the_bits_of_its_neighbours():
    """No filter anywhere, and none at all being random, take other branches of the program."""
    logits = logits_of(R, V)
    plain = [SamplingParams(), SamplingParams(temperature=0.8, seed=1), SamplingParams(temperature=1.5, seed=2)]
    plain += [SamplingParams()] * (R - 3)
    filtered = [*plain[:-1], SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=9)]
    found = [choose(logits, positions(R), arrays_of(params)) for params in (plain, filtered, [SamplingParams()] * R)]
    assert found[0][0][:-1].tolist() == found[1][0][:-1].tolist()
    assert (bits(found[0][1])[:-1] == bits(found[1][1])[:-1]).all()
    assert found[0][0][0] == found[2][0][0]
    assert bits(found[0][1])[0] == bits(found[2][1])[0]
    assert found[1][0][1:3].tolist() != found[2][0][1:3].tolist()


# Seed and position ----------------------------------------------------------------------------------------------------------


def test_same_seed_and_position_choose_the_same_token_in_any_row_and_batch():
    logits_row = logits_of(1, V)[0]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=77)
    alone = choose(logits_row[None], np.int32([30]), arrays_of([params]))
    for rows, row in ((8, 7), (R, 0), (R, 41)):
        others = [SamplingParams(temperature=0.5, seed=s) for s in range(rows)]
        others[row] = params
        logits, at = logits_of(rows, V, seed=rows), positions(rows)
        logits[row], at[row] = logits_row, 30
        tokens, logprobs = choose(logits, at, arrays_of(others))
        assert tokens[row] == alone[0][0]
        assert bits(logprobs)[row] == bits(alone[1])[0]


@pytest.mark.parametrize("what", ["seed", "position"])
def test_other_seeds_and_positions_choose_other_tokens(what):
    logits = np.zeros((R, V), np.float32)
    seeds = range(R) if what == "seed" else [0] * R
    at = positions(R) if what == "position" else np.zeros(R, np.int32)
    tokens = choose(logits, at, arrays_of([SamplingParams(temperature=1.0, seed=s) for s in seeds]))[0]
    assert len(set(tokens.tolist())) > 40  # 64 draws of 1000: about 62 different ones


def test_seed_at_the_end_of_its_range_is_a_seed_of_its_own():
    seeds = (0, 2**31, 2**32 - 1)
    rows = arrays_of([SamplingParams(temperature=1.0, seed=seeds[r % 3]) for r in range(R)])
    tokens = choose(np.zeros((R, V), np.float32), positions(R) // 3, rows)[0]
    assert len({tuple(tokens[first : R - 1 : 3].tolist()) for first in range(3)}) == 3  # 21 draws each, at the same positions


# Distribution ---------------------------------------------------------------------------------------------------------------


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max())
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_are_distributed_as_softmax(temperature):
    """7 degrees of freedom: chi-square exceeds 24.3 once in a thousand draws; the seeds are fixed."""
    logits_row = np.float32([0, 1, -1, 0.5, 2, -0.5, 0.2, 1.5])
    by_position = sampled(logits_row, SamplingParams(temperature=temperature, seed=1))
    seeds = arrays_of([SamplingParams(temperature=temperature, seed=s) for s in range(DRAWS)])
    by_seed = np.asarray(choose(np.tile(widened(logits_row, KINDS), (DRAWS, 1)), np.full(DRAWS, 3, np.int32), seeds)[0])
    for tokens in (by_position, by_seed):
        assert chi_square(tokens, softmax(logits_row / temperature)) < 24.3
        assert chi_square(tokens, softmax(logits_row / (1.2 * temperature))) > 24.3


def test_tokens_under_filters_are_distributed_as_the_renormalised_softmax():
    """3 of 8 are kept: 2 degrees of freedom, 13.8 once in a thousand."""
    logits_row = np.float32([0, 1, -1, 0.5, 2, -0.5, 0.2, 1.5])
    tokens = sampled(logits_row, SamplingParams(temperature=1.0, top_k=3, seed=1))
    kept = [1, 4, 7]
    assert set(tokens.tolist()) == set(kept)
    assert chi_square(np.searchsorted(kept, tokens), softmax(logits_row[kept])) < 13.8


# Log-probabilities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reductions", ["fixed", "native"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_raw_distribution(temperature, reductions):
    """Before temperature and filters."""
    logits = logits_of(R, V)
    rows = arrays_of([SamplingParams(temperature=temperature, top_k=50 if temperature else 0, seed=s) for s in range(R)])
    tokens, logprobs = choose(logits, positions(R), rows, numerics=Numerics(reductions=reductions))
    x = logits.astype(np.float64)
    exact = x - x.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    # Numbers of size 16 in float32, subtracted twice: 3 * 16 * 2**-24 = 3e-6; the sum's own error is smaller.
    np.testing.assert_allclose(logprobs, exact[np.arange(R), np.asarray(tokens)], rtol=0, atol=4e-6)


@pytest.mark.parametrize("changes", [*FILTERS, {"temperature": 0.0, "top_k": 2}, {"temperature": 1e-3}], ids=str)
def test_processed_logprobs_are_of_the_distribution_that_tokens_are_drawn_from(changes):
    """Scaled, and renormalised over what the filters keep; greedy rows are neither scaled nor filtered."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, "logprobs_mode": "processed", **changes})
    logits_row = np.random.default_rng(3).permutation(np.log(0.75) * np.arange(KINDS)).astype(np.float32)
    logits = np.tile(widened(logits_row, V), (R, 1))
    tokens, logprobs = choose(logits, positions(R), arrays_of([params] * R))
    greedy = params.temperature == 0
    kept = sorted(range(KINDS) if greedy else kept_set(logits_row, params))
    exact = np.full(KINDS, -np.inf)
    exact[kept] = np.log(softmax(logits_row[kept].astype(np.float64) / (params.temperature or 1)))
    # Numbers of size 3 / T in float32, subtracted twice: 3 * 3 * 2**-24 = 5e-7 / T.
    np.testing.assert_allclose(logprobs, exact[np.asarray(tokens)], rtol=0, atol=1e-6 / (params.temperature or 1))
    plain = [dataclasses.replace(params, logprobs_mode="raw")] * (R - 1)
    among = choose(logits, positions(R), arrays_of([params, *plain]))
    assert among[0].tolist() == tokens.tolist()
    assert bits(among[1])[0] == bits(logprobs)[0]
    same = greedy or (params.temperature == 1 and len(kept) == KINDS)
    assert (bits(among[1])[1:] == bits(logprobs)[1:]).all() == same


def logprob_variants(vocab: int, numerics: Numerics) -> int:
    """How many answers a row gets among 0, 7 and 63 others."""
    logits = logits_of(R, vocab)
    found = set()
    for rows in (1, 8, R):
        params = arrays_of([SamplingParams()] * rows)
        tokens, logprobs = choose(logits[:rows], positions(rows), params, numerics=numerics)
        found.add((int(tokens[0]), int(bits(logprobs)[0])))
    return len(found)


def test_logprobs_beside_any_number_of_rows_have_the_same_bits():
    assert logprob_variants(V, Numerics()) == 1


def test_logprobs_summed_in_the_backends_own_order_have_other_bits_somewhere():
    assert any(logprob_variants(vocab, Numerics(reductions="native")) > 1 for vocab in (V, 256, 688, 97))


HIDING = {"logprobs_mode": "processed", "min_tokens": 9, "stop_token_ids": [7], "temperature": 0.5, "top_k": 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("changes", [{}, HIDING], ids=["raw", "banned and processed"])
def test_logprob_of_a_row_with_a_broken_logit_is_nan_and_of_its_neighbour_not(changes, bad):
    logits = logits_of(R, V)
    rows = arrays_of([SamplingParams(**changes)] * R)
    clean = choose(logits, positions(R), rows)[1]
    assert np.isfinite(clean).all()
    logits[0, 7] = bad
    logprobs = choose(logits, positions(R), rows)[1]
    assert np.isnan(logprobs[0])
    assert (bits(logprobs)[1:] == bits(clean)[1:]).all()


# Temperatures near 0 --------------------------------------------------------------------------------------------------------

TINY = [1e-33, 6e-38, 2e-38, 1.2e-38, float(np.finfo(np.float32).tiny), 1e-45, 1e-300]
FILTERED = {"top_k": 5, "top_p": 0.9, "min_p": 0.01}


def tempered_near_zero(temperature: float, **changes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of size 60 with equal largest ones in every other row; the tokens, and their log-probabilities."""
    logits = 20 * logits_of(R, V)
    logits[::2, 900] = logits[::2].max(-1)
    params = [SamplingParams(temperature=temperature, seed=s, **changes) for s in range(R)]
    tokens, logprobs = choose(logits, positions(R), arrays_of(params))
    return logits, np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize("changes", [{}, FILTERED], ids=["free", "filtered"])
@pytest.mark.parametrize("temperature", TINY)
def test_temperature_near_zero_is_greedy(temperature, changes):
    logits, tokens, logprobs = tempered_near_zero(temperature, **changes)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    greedy = choose(logits, positions(R), arrays_of([SamplingParams()] * R))
    assert (bits(logprobs) == bits(greedy[1])).all()  # those of the model itself


@pytest.mark.parametrize("mode", ["processed", "tempered"])
@pytest.mark.parametrize("temperature", TINY)
def test_likeliest_token_near_zero_has_all_of_the_probability(temperature, mode):
    """Equal ones have equal parts of it."""
    _, _, logprobs = tempered_near_zero(temperature, logprobs_mode=mode)
    assert bits(logprobs[1::2]).tolist() == [0] * (R // 2)
    # A sum of two ones, and the logarithm of 2 in float32.
    np.testing.assert_allclose(logprobs[::2], -math.log(2), rtol=0, atol=1e-7)


def test_token_that_is_not_the_likeliest_near_zero_has_a_finite_log_probability():
    """A bias chooses it, which `tempered` does not count: it must not end with an error."""
    params = [SamplingParams(temperature=2e-38, logprobs_mode="tempered", logit_bias={7: 100.0})] * R
    tokens, logprobs = choose(logits_of(R, V), positions(R), arrays_of(params))
    assert tokens.tolist() == [7] * R
    assert np.isfinite(logprobs).all()
    assert (np.asarray(logprobs) < -1e29).all()


def test_log_probability_of_what_is_banned_near_zero_stays_minus_infinity():
    rows = sampling_arrays([SamplingParams(temperature=2e-38)], max_stop_ids=1, max_logit_bias=1)
    scaled = np.asarray(tempered(np.float32([[9, 5, -np.inf]]), rows.temperature))
    assert (bits(scaled) == bits([[CERTAIN, -CERTAIN, -np.inf]])).all()


def test_temperatures_whose_quotients_fit_divide_and_do_nothing_else():
    """As XLA divides, whose quotients have other bits than numpy's."""
    logits = logits_of(R, V)
    divide = jax.jit(lambda logits, temperatures: logits / temperatures[:, None])
    same = []
    for temperature in (1e-36, 1e-3, 0.7, 1.0, 5.0, 2e-38):
        rows = arrays_of([SamplingParams(temperature=temperature)] * R)
        quotients = divide(logits, np.full(R, temperature, np.float32))
        same.append(bool((bits(jax.jit(tempered)(logits, rows.temperature)) == bits(quotients)).all()))
    assert same == [True] * 5 + [False]


def test_devices_see_no_subnormal_numbers():
    """Subnormal numbers of some devices are 0."""
    params = SamplingParams(temperature=1e-40, top_p=1e-40, min_p=1e-45, presence_penalty=-1e-41, logit_bias={3: 1e-39})
    rows = arrays_of([params])
    numbers = [float(x[0]) for x in (rows.temperature, rows.top_p, rows.min_p, rows.presence_penalty)]
    assert numbers == [float(np.finfo(np.float32).tiny), 0.0, 0.0, 0.0]
    assert not np.asarray(rows.packed)[0, -1]


# Parameters -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, 1.5, "4", True, 2**31, 10**400, [3]]),
        ("temperature", [-0.1, math.inf, math.nan, "1", True, 1e39, 10**400, np.bool_(True)]),
        ("top_k", [-2, 0.5, 2**31]),
        ("top_p", [0, 1.01, -1, math.nan, "0.9"]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("seed", [-(2**63) - 1, 2**63, 0.0]),
        ("ignore_eos", [1, "yes"]),
        ("deterministic", [0, np.int64(1)]),
        ("logprobs_mode", ["raw_logprobs", True, 1]),
        ("stop_token_ids", [(-1,), (1.0,), (True,), ("a",), (2**31,), (2**63,), (None,), 5, "5", b"5"]),
        ("n", [0, 1025, 1.0, True, "2"]),
        ("min_tokens", [-1, 65, 1.0, True, 2**63]),  # max_tokens is 64
        ("logprobs", [-1, 21, True]),
        ("prompt_logprobs", [-1, 21, 1.0, False]),
        ("repetition_penalty", [0, -1.0, math.inf, math.nan, True, 1e-45]),
        ("frequency_penalty", [-2.1, 2.1, math.nan, "1"]),
        ("presence_penalty", [-2.1, 2.1, math.nan, True]),
        ("stop", ["", 3, ("",), ("a\ufffd",), (3,), {"a": 1}, (None,)]),
        ("logit_bias", [3, "3", [1], [(1, 2, 3)]]),
    ],
)
def test_sampling_params_with_a_bad_value_name_the_parameter_and_the_value(name, values):
    for value in values:
        shown = value[0] if isinstance(value, tuple) else value
        with pytest.raises(ParameterError, match=f"{name} .*{re.escape(repr(shown))}") as refused:
            SamplingParams(**{name: value})
        assert refused.value.name == name


def test_sampling_params_refuse_too_many_stop_strings():
    assert len(SamplingParams(stop=["a"] * 1024).stop) == 1024
    with pytest.raises(ParameterError, match="stop must hold at most 1024 strings, got 1025"):
        SamplingParams(stop=["a"] * 1025)
    with pytest.raises(ParameterError, match="stop must hold at most 16384 characters in all, got 16385"):
        SamplingParams(stop=["a" * 16384, "b"])
    for name, given in (("stop_token_ids", range(4097)), ("logit_bias", dict.fromkeys(range(4097), 1))):
        with pytest.raises(ParameterError, match=f"{name} must name at most 4096 tokens, got 4097"):
            SamplingParams(**{name: given})
    assert len(SamplingParams(stop_token_ids=[*range(4096), 5, 5]).stop_token_ids) == 4096


def test_sampling_params_refuse_an_integer_that_python_does_not_write():
    for name in ("max_tokens", "temperature", "seed", "stop_token_ids"):
        value = 10**5000
        with pytest.raises(ParameterError, match=f"{name} .* a value of type (int|list) that cannot be shown"):
            SamplingParams(**{name: [value] if name == "stop_token_ids" else value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_sampling_params_take_none_for_the_default(name):
    assert SamplingParams(**{name: None}) == SamplingParams()


def test_top_k_of_minus_one_is_off():
    for off in (-1, np.int32(-1)):
        params = SamplingParams(temperature=0.5, top_k=off)
        assert params == SamplingParams(temperature=0.5)
        assert not params.needs_processing
    assert SamplingParams(temperature=0.5, top_k=1).needs_processing


GIVEN = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.75,
    "min_p": 0.25,
    "seed": 7,
    "logprobs": 2,
    "ignore_eos": True,
    "stop_token_ids": [3, 4],
    "stop": ["a", "b"],
    "logit_bias": {5: 1.5, 6: -2.0},
}
ARRAYS = {name: np.asarray(value) for name, value in GIVEN.items() if name != "logit_bias"}


@pytest.mark.parametrize(
    "changes",
    [
        {**ARRAYS, "logit_bias": {np.int64(5): np.float32(1.5), np.int16(6): np.float64(-2)}},
        {
            "temperature": np.longdouble(0.5),
            "seed": jnp.int32(7),
            "top_p": jnp.bfloat16(0.75),
            "stop_token_ids": jnp.asarray([3, 4]),
            "logit_bias": [[np.int64(5), 1.5], (6, -2)],
        },
        {"stop_token_ids": (np.int64(3), jnp.int32(4)), "stop": (np.str_("a"), "b"), "ignore_eos": np.bool_(True)},
    ],
    ids=["numpy", "jax", "mixed"],
)
def test_sampling_params_of_arrays_are_those_of_plain_values(changes):
    plain = SamplingParams(**GIVEN)
    found = SamplingParams(**{**GIVEN, **changes})
    assert found == plain
    assert hash(found) == hash(plain)
    assert json.dumps(found.facts()) == json.dumps(plain.facts())
    assert {type(token) for token in found.stop_token_ids} == {int}
    assert {type(string) for string in found.stop} == {str}


def test_sampling_params_of_minus_zero_are_those_of_zero():
    assert json.dumps(SamplingParams(temperature=-0.0).facts()) == json.dumps(SamplingParams().facts())


def test_sampling_params_take_numpy_numbers_and_lists():
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(2), stop_token_ids=[1, 2])
    assert params.stop_token_ids == (1, 2)
    assert hash(params) == hash(SamplingParams(max_tokens=3, temperature=0.5, top_k=2, stop_token_ids=(1, 2)))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({-1: 1.0}, "logit_bias .* got -1"),
        ({"+1": 1.0}, r"logit_bias .* got '\+1'"),
        ({True: 1.0}, "logit_bias .* got True"),
        ({2**31: 1.0}, "logit_bias .* got 2147483648"),
        ({1: 100.5}, "logit_bias .* got 100.5"),
        ({1: math.nan}, "logit_bias .* got nan"),
        ({1: "2"}, "logit_bias .* got '2'"),
        ({1: 2.0, "1": 2.0}, "names token 1 twice"),
    ],
)
def test_logit_bias_with_a_bad_token_or_value_is_refused(bias, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(logit_bias=bias)


def test_sampling_params_read_from_json_are_those_of_python_and_survive_the_way_back():
    given = json.loads('{"logit_bias": {"12": 1, "3": -2.5}, "stop": "end", "temperature": 1, "stop_token_ids": [4]}')
    params = dataclasses.replace(SamplingParams(), **given)
    assert params == SamplingParams(logit_bias=((3, -2.5), (12, 1.0)), stop=["end"], temperature=1.0, stop_token_ids=(4,))
    assert hash(params) == hash(
        SamplingParams(logit_bias={12: 1.0, 3: -2.5}, stop=("end",), temperature=1.0, stop_token_ids=[4])
    )
    assert params.facts() == dataclasses.asdict(params)
    facts = json.dumps(params.facts(), sort_keys=True)
    same = SamplingParams(logit_bias={np.int64(12): np.float32(1), 3: -2.5}, stop="end", temperature=1.0, stop_token_ids=[4])
    assert json.dumps(same.facts(), sort_keys=True) == facts  # what a digest is made of
    assert SamplingParams(**json.loads(facts)) == params
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias
    assert dataclasses.replace(params, logit_bias={}) != params


@pytest.mark.parametrize(
    ("given", "kept"),
    [(0, 0), (2**32 - 1, 2**32 - 1), (2**32, 0), (-1, 2**32 - 1), (2**63 - 1, 2**32 - 1), (-(2**63), 0), (2**40 + 7, 7)],
)
def test_seed_of_64_bits_counts_modulo_2_to_the_32(given, kept):
    assert SamplingParams(seed=given) == SamplingParams(seed=kept)
    assert SamplingParams(seed=np.int64(given)).seed == kept
    samples = [sample.sampling.seed for sample in Request("a", (1,), SamplingParams(seed=given, n=3)).samples()]
    assert samples == [(kept + i) % 2**32 for i in range(3)]


def test_sampling_arrays_fills_up_the_lists_of_each_row():
    """Row 0 asks for nothing but has the model's stop token 7; row 1 ignores it."""
    asks = SamplingParams(logit_bias={5: 1.5, 2: -1.0}, stop_token_ids=(3,), ignore_eos=True, min_tokens=4)
    rows = sampling_arrays([SamplingParams(), asks], [2, 3], eos_ids=[7], max_stop_ids=2, max_logit_bias=3)
    assert rows.stop_ids.tolist() == [[7, NO_TOKEN], [3, NO_TOKEN]]
    assert rows.bias_ids.tolist() == [[NO_TOKEN] * 3, [2, 5, NO_TOKEN]]
    assert rows.bias_values.tolist() == [[0.0] * 3, [-1.0, 1.5, 0.0]]
    assert (rows.prompt_len.tolist(), rows.min_len.tolist()) == ([2, 3], [2, 7])
    for room in ({"max_stop_ids": 0}, {"max_logit_bias": 1}):
        with pytest.raises(InputError, match="there is room for"):
            sampling_arrays([SamplingParams(), asks], **room)


def test_sampling_arrays_stacks_one_value_per_row():
    rows = sampling_arrays([SamplingParams(), SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**32 - 1)])
    assert rows.temperature.tolist() == [0.0, 0.5]
    assert rows.top_k.tolist() == [0, 3]
    assert rows.seed.tolist() == [0, 2**32 - 1]
    assert (rows.top_p.dtype, rows.seed.dtype) == (jnp.float32, jnp.uint32)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-50])
def test_temperature_close_to_zero_equals_greedy(temperature):
    """1e-50 is 0 in float32."""
    logits = np.tile(widened(np.float32([0, 5, 10]), V), (R, 1))
    tokens = choose(logits, positions(R), arrays_of([SamplingParams(temperature=temperature)] * R))[0]
    assert tokens.tolist() == [2] * R
