"""Requests beside others: how good the guesses are, who stops early, in which order rows stand, how large the crowd is."""

import dataclasses
import itertools

import numpy as np
import pytest

from detspec.config import ModelConfig
from detspec.state import LENGTH, STOP
from tests.fakes import Request
from tests.generate.one_at_a_time import (
    BF16,
    F32,
    FIXED,
    MAX_LEN,
    MAX_NEW,
    V,
    generate_all,
    guesses,
    make_schedule,
    one_at_a_time,
    partly_right,
    results,
)

CROWD = [Request(r.prompt, dataclasses.replace(r.sampling, max_tokens=8)) for r in FIXED]


def first_of_a_crowd(cfg: ModelConfig, batch: int, *, deterministic: bool) -> tuple:
    """The result of `CROWD[0]` with `batch - 1` others beside it."""
    crowd = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=deterministic)) for r in CROWD]
    crowd = list(itertools.islice(itertools.cycle(crowd), batch))
    return results(generate_all(crowd, schedule=make_schedule(64, 4), source="self", cfg=cfg))[0]


def test_references_hold_varied_texts():
    """A model that repeats itself would agree with everything."""
    texts = [one_at_a_time(request)[0] for request in FIXED]
    new = [text[len(request.prompt) :] for text, request in zip(texts, FIXED, strict=True)]
    assert [len(tokens) for tokens in new] == [MAX_NEW] * len(FIXED)
    assert min(len(set(tokens)) for tokens in new) >= MAX_NEW // 3
    assert len({token for tokens in new for token in tokens}) >= 50
    assert len(set(new)) == len(new)


@pytest.mark.parametrize("kind", ["perfect", "wrong", "empty"])
def test_draft_of_known_quality_changes_the_counters_and_no_bit(kind):
    """24 new tokens in windows of 8: three passes of 8 if every guess is right, 24 passes if none is or there is none."""
    rng = np.random.default_rng(0)
    expected = [one_at_a_time(request) for request in FIXED]
    told = [guesses(kind, request, answer[0], rng) for request, answer in zip(FIXED, expected, strict=True)]
    state = generate_all(
        FIXED,
        schedule=make_schedule(64, 8),
        source="recorded",
        recorded=(np.stack([tokens for tokens, _ in told]), np.asarray([length for _, length in told], np.int32)),
    )
    assert results(state) == expected
    B = len(FIXED)
    passes, accepted, rollbacks = {"perfect": (3, 21, 0), "wrong": (24, 0, 23), "empty": (24, 0, 0)}[kind]
    assert state.counters.num_verify_passes.tolist() == [passes] * B
    assert state.counters.num_accepted_draft_tokens.tolist() == [accepted] * B
    assert state.counters.num_rollbacks.tolist() == [rollbacks] * B  # the last pass has no room for a guess


def test_neighbours_that_stop_early_or_are_ordinary_change_no_bit():
    """Some 24 of 211 tokens stop the second and third row; the fourth and fifth commit their guesses unverified."""
    stops = tuple(range(0, V, 9))
    requests = [FIXED[0], *(Request(r.prompt, dataclasses.replace(r.sampling, stop_token_ids=stops)) for r in FIXED[1:3])]
    ordinary = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=False)) for r in FIXED[3:]]
    expected = [one_at_a_time(request) for request in requests]
    assert [finish for _, _, finish in expected] == [LENGTH, STOP, STOP]
    told = [guesses("partly right", r, one_at_a_time(r)[0], np.random.default_rng(0)) for r in (*requests, *ordinary)]
    state = generate_all(
        [*requests, *ordinary],
        schedule=make_schedule(64, 8),
        source="recorded",
        recorded=(np.stack([tokens for tokens, _ in told]), np.full(5, MAX_LEN, np.int32)),
    )
    found = results(state)
    assert found[:3] == expected
    assert found[3:] != [one_at_a_time(request) for request in FIXED[3:]]  # wrong guesses went in as they were
    assert state.counters.num_verify_passes[3:].tolist() == [1, 1]  # the very last token has no guess, so it was verified


def test_row_order_permuted_with_its_requests_permutes_the_results():
    recorded, lengths = partly_right(FIXED)
    schedule = make_schedule(64, 8)
    straight = results(generate_all(FIXED, schedule=schedule, source="recorded", recorded=(recorded, lengths)))
    order = [3, 0, 4, 2, 1]
    permuted = generate_all(
        [FIXED[i] for i in order], schedule=schedule, source="recorded", recorded=(recorded[order], lengths)
    )
    assert results(permuted) == [straight[i] for i in order]
    assert len(set(straight)) == len(straight)  # else any order would do


# Inverse control ------------------------------------------------------------------------------------------------------------


def test_deterministic_row_in_a_crowd_keeps_its_bits():
    assert first_of_a_crowd(F32, 64, deterministic=True) == one_at_a_time(CROWD[0], cfg=F32)


def test_ordinary_row_in_crowds_of_other_sizes_gets_other_bits():
    """What verification is for. Which sizes and dtypes differ depends on the device and on jax's version."""
    for cfg in (F32, BF16):
        alone = first_of_a_crowd(cfg, 1, deterministic=False)
        for batch in (64, 16, 2):
            if first_of_a_crowd(cfg, batch, deterministic=False)[1] != alone[1]:
                return
    pytest.fail("the ordinary path gave equal bits in every batch: the comparisons of this file show nothing here")


# What a device certifies ----------------------------------------------------------------------------------------------------


def test_row_budgets_on_this_cpu_give_equal_bits():
    """Not promised: bits may depend on the number of rows of a pass. CPUs have given equal bits so far; should one not, then
    its certified set of budgets is smaller, and this test states which."""
    found = {rows: [one_at_a_time(FIXED[i], rows) for i in (1, 3)] for rows in (1, 4, 16, 64, 128)}
    assert {rows: answer == found[64] for rows, answer in found.items()} == dict.fromkeys(found, True)
