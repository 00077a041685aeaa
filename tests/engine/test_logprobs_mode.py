"""Processed log-probabilities are as independent of everything as raw ones, and no token depends on which are asked for."""

import dataclasses

import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from tests.engine.byte_model import facts, ordinary, some_prompts, some_sampling

PROMPTS = some_prompts()
CHANGES = (
    {},
    {},
    {"top_k": 3, "top_p": 1.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logit_bias": {7: 4.0, 8: 4.0}},
    {"min_p": 0.02},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"min_tokens": 4, "stop_token_ids": (7, 8)},
)
SAMPLING = [dataclasses.replace(s, logprobs=5, **c) for s, c in zip(some_sampling(), CHANGES, strict=True)]
PROCESSED = [dataclasses.replace(s, logprobs_mode="processed") for s in SAMPLING]


@pytest.fixture(scope="module")
def alone(one_row: Engine) -> list[Completion]:
    return one_row.generate(PROMPTS, PROCESSED)


def everything(completions: list[Completion]) -> list[tuple]:
    return [(*facts(c), c.top_logprobs, c.logprobs_mode, c.digest) for c in completions]


def test_processed_logprobs_differ_from_raw_ones_where_they_must_and_no_token_does(one_row, alone):
    raw = one_row.generate(PROMPTS, SAMPLING)
    assert [(c.token_ids, c.finish_reason) for c in raw] == [(c.token_ids, c.finish_reason) for c in alone]
    differs = [a.logprobs != b.logprobs for a, b in zip(raw, alone, strict=True)]
    assert differs[:7] == [False] + [True] * 6  # the first is greedy with nothing to process
    assert ({c.logprobs_mode for c in raw}, {c.logprobs_mode for c in alone}) == ({"raw"}, {"processed"})


@pytest.mark.slow
def test_processed_logprobs_beside_others_and_drafted_keep_their_bits(three_rows, alone):
    assert everything(three_rows.generate(PROMPTS, PROCESSED)) == everything(alone)
    mixed = [a if i % 2 else b for i, (a, b) in enumerate(zip(SAMPLING, PROCESSED, strict=True))]
    assert everything(three_rows.generate(PROMPTS[::-1], mixed[::-1]))[::-1][::2] == everything(alone)[::2]


def test_processed_logprobs_of_ordinary_requests_have_other_bits_somewhere(one_row, three_rows, eight_rows):
    """The inverse control; which sizes differ depends on the device and on jax's version."""
    unverified = [ordinary(sampling) for sampling in PROCESSED]
    alone = [facts(c) for c in one_row.generate(PROMPTS, unverified)]
    assert any([facts(c) for c in engine.generate(PROMPTS, unverified)] != alone for engine in (three_rows, eight_rows))


def test_stream_reports_processed_logprobs(alone, three_rows):
    for index in (2, 3):
        pieces = list(three_rows.stream(PROMPTS[index], PROCESSED[index]))
        assert sum((piece.logprobs for piece in pieces), ()) == alone[index].logprobs


def test_likeliest_tokens_are_of_the_processed_distribution_and_those_of_the_prompt_raw(one_row, alone):
    """The chosen token is among them with its very bits, and the three that top_k leaves are the whole distribution."""
    greedy, filtered = alone[6], alone[2]
    assert [top[0] for top in greedy.top_logprobs] == list(zip(greedy.token_ids, greedy.logprobs, strict=True))
    for token, logprob, top in zip(filtered.token_ids, filtered.logprobs, filtered.top_logprobs, strict=True):
        assert (token, logprob) in top
        assert np.isfinite([kept for _, kept in top]).tolist() == [True] * 3 + [False] * 2
        # Three float32 terms whose logarithms are below 16: 3 * 16 * 2**-24 = 3e-6.
        assert abs(sum(np.exp(kept) for _, kept in top) - 1) < 4e-6
    asked = dataclasses.replace(PROCESSED[3], prompt_logprobs=2)
    found = [one_row.generate(PROMPTS[3:4], dataclasses.replace(asked, logprobs_mode=mode))[0] for mode in ("raw", "processed")]
    assert found[0].prompt_logprobs == found[1].prompt_logprobs
    assert found[0].prompt_top_logprobs == found[1].prompt_top_logprobs
    assert found[0].top_logprobs != found[1].top_logprobs == alone[3].top_logprobs
