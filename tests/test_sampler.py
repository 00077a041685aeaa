"""Bias, minimum length and penalties: what they do to logits, counted from the text before each choice alone."""

import dataclasses
from collections import Counter
from functools import partial

import jax
import numpy as np
import pytest

from detspec.riders.rider import Rows
from detspec.sampler import likeliest, process_if_asked, process_logits, sample
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.schedule import Numerics
from tests.fakes import bits

pytestmark = pytest.mark.optimised

V, T, EOS = 37, 24, 5
ASKS = (
    {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": -1.1},
    {"logit_bias": {EOS: 9.5, 0: -3.25, V - 1: 0.1}, "min_tokens": 4, "stop_token_ids": [0, V - 1]},
    {},
    {"repetition_penalty": 0.6, "min_tokens": 2, "ignore_eos": True},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.3, "logit_bias": {3: 100.0}},
)
PARAMS = [SamplingParams(**ask) for ask in ASKS]
ROOM = {"max_stop_ids": V, "max_logit_bias": 3}
process = jax.jit(process_logits)


@partial(jax.jit, static_argnames=("processing",))
def choose(logits, position, rows, texts, *, processing=True):
    process_fn = partial(process_if_asked, (), Rows(rows, position, lambda: texts)) if processing else None
    return sample(logits, position, rows, process_fn, numerics=Numerics())


def processed_by_hand(logits: np.ndarray, params: SamplingParams, text: list[int], prompt_len: int) -> np.ndarray:
    """Processes a row's logits, token after token; `text` is all that stands before the choice."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        x[token] += bias
    if len(text) < prompt_len + params.min_tokens:
        x[[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]] = -np.inf
    for token in set(text):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(text[prompt_len:]).items():
        x[token] -= count * params.frequency_penalty + params.presence_penalty
    return x


def example(W: int, seed: int, **changes):
    """`X` texts with `W` choices each: logits, positions, rows, texts, prompt lengths; `changes` for all parameters."""
    rng = np.random.default_rng(seed)
    X = len(PARAMS)
    prompt_lens = rng.integers(1, 12, X)
    first = prompt_lens + rng.integers(0, 8, X)  # 0: nothing is new yet
    first[0] = T - W + 1  # the last choice of this text sees all of it
    texts = rng.integers(0, 9, (X, T)).astype(np.int32)  # few tokens, so that they repeat
    position = (first[:, None] + np.arange(W)).astype(np.int32).reshape(-1)
    rows = sampling_arrays([dataclasses.replace(p, **changes) for p in PARAMS], prompt_lens.tolist(), eos_ids=[EOS], **ROOM)
    rows = jax.tree.map(lambda x: np.repeat(x, W, axis=0), rows)
    logits = (3 * rng.standard_normal((X * W, V))).astype(np.float32)
    return logits, position, rows, texts, prompt_lens


@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_processed_logits_equal_those_worked_out_token_by_token(W, seed):
    logits, position, rows, texts, prompt_lens = example(W, seed)
    found = np.asarray(process(logits, position, rows, texts))
    for r, at in enumerate(position):
        x = r // W
        expected = processed_by_hand(logits[r], PARAMS[x], texts[x, :at].tolist(), int(prompt_lens[x]))
        # Numbers up to 128 in float32 against float64, a few operations each: 4 * 128 * 2**-24 = 3e-5.
        np.testing.assert_allclose(found[r], expected, rtol=0, atol=3e-5)
        if ASKS[x]:
            assert not np.array_equal(found[r], logits[r])
        else:
            assert (bits(found[r]) == bits(logits[r])).all()


def test_processed_logits_of_windows_have_the_bits_of_one_choice_at_a_time():
    logits, position, rows, texts, _ = example(4, 2)
    windows = process(logits, position, rows, texts)
    each = process(logits, position, rows, np.repeat(texts, 4, axis=0))
    assert (bits(windows) == bits(each)).all()


@pytest.mark.parametrize("W", [1, 4])
def test_choice_sees_the_places_before_it_and_none_after(W):
    logits, position, rows, texts, _ = example(W, 3)
    clean = process(logits, position, rows, texts)
    last = position.reshape(-1, W)[:, -1]
    place = np.arange(T)[None, :]
    spoilt = np.where(place >= last[:, None], V - 2, texts)  # what a rejected draft or an earlier request left behind
    assert (bits(process(logits, position, rows, spoilt)) == bits(clean)).all()
    nearer = np.where(place >= last[:, None] - 1, V - 2, texts)
    differs = (bits(process(logits, position, rows, nearer)) != bits(clean)).any(1).reshape(-1, W)
    assert differs[:, -1].tolist() == [True, False, False, True, True, True]
    assert not differs[:, :-1].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_tokens_are_those_of_the_processed_logits_and_log_probabilities_of_the_raw_ones(temperature):
    logits, position, rows, texts, _ = example(4, 4, temperature=temperature)
    neutral = sampling_arrays([SamplingParams(temperature=temperature)] * len(logits), **ROOM)
    tokens, logprobs = choose(logits, position, rows, texts)
    processed = process(logits, position, rows, texts)
    expected = choose(processed, position, neutral, texts)[0]
    plain = choose(logits, position, neutral, texts)[0]
    assert tokens.tolist() == expected.tolist()
    assert tokens.tolist() != plain.tolist()
    x = logits.astype(np.float64)
    exact = x[np.arange(len(x)), np.asarray(tokens)] - np.log(np.exp(x).sum(-1))
    np.testing.assert_allclose(logprobs, exact, rtol=0, atol=4e-6)  # as in test_sampling.py


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_processed_logprobs_equal_those_worked_out_token_by_token(temperature):
    logits, position, rows, texts, prompt_lens = example(4, 5, temperature=temperature, logprobs_mode="processed")
    as_raw = example(4, 5, temperature=temperature)[2]
    tokens, logprobs = choose(logits, position, rows, texts)
    raw = choose(logits, position, as_raw, texts)
    assert raw[0].tolist() == tokens.tolist()
    for r, at in enumerate(position):
        params = PARAMS[r // 4]
        x = processed_by_hand(logits[r], params, texts[r // 4, :at].tolist(), int(prompt_lens[r // 4]))
        x /= temperature or 1
        x -= x.max()
        # The logits' error of 3e-5, over the temperature; the sum's own is smaller.
        np.testing.assert_allclose(logprobs[r], x[int(tokens[r])] - np.log(np.exp(x).sum()), rtol=0, atol=5e-5)
    unasked = np.repeat([not ask for ask in ASKS], 4)
    assert (bits(raw[1]) == bits(logprobs))[unasked].all() == (temperature == 0)
    assert not (bits(raw[1]) == bits(logprobs))[~unasked].all()


WAYS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "seed": 9},
    {"top_p": 0.1, "top_k": 1},
    {"ignore_eos": True, "max_tokens": 3},
]
NEEDY = [
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.5},
    {"repetition_penalty": 3.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"logit_bias": {3: 90.0}},
    {"min_tokens": 40, "max_tokens": 40, "stop_token_ids": tuple(range(4, V))},
    {"temperature": 0.5, "logprobs_mode": "processed"},
]


@pytest.mark.parametrize("params", [*WAYS, *NEEDY], ids=str)
def test_programs_without_processing_give_the_same_bits_where_none_is_needed_and_others_where_it_is(params):
    sampling = SamplingParams(**params)
    assert sampling.needs_processing == (params in NEEDY)
    logits, position, _, texts, _ = example(4, 7)
    rows = sampling_arrays([sampling] * len(logits), [1] * len(logits), **ROOM)
    with_it, without = (choose(logits, position, rows, texts, processing=processing) for processing in (True, False))
    same = (np.asarray(with_it[0]) == without[0]).all() & (bits(with_it[1]) == bits(without[1])).all()
    assert same == (not sampling.needs_processing)


def test_likeliest_tokens_are_the_same_for_any_number_of_them_and_the_lower_of_equals_comes_first():
    logits = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    logits[1] = -1
    logits[1, [17, 4, 200, 9]] = 5, 0.0, -0.0, -0.0  # zeros are equals, whatever their signs are
    logits[2] = -np.inf
    logits[2, 40] = 0
    find = jax.jit(likeliest, static_argnums=1)
    found = np.asarray(find(logits, 6))
    assert found.dtype == np.int32
    assert found[0].tolist() == np.argsort(-logits[0])[:6].tolist()
    assert found[1].tolist() == [17, 4, 9, 200, 0, 1]
    assert found[2].tolist() == [40, 0, 1, 2, 3, 4]
    for number in (0, 1, 2):
        assert np.asarray(find(logits, number)).tolist() == found[:, :number].tolist()
