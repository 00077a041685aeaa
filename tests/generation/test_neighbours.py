"""Requests among others: how good the drafts are, which stop early, in which order they stand."""

import dataclasses

import numpy as np
import pytest

from detspec.state import LENGTH, STOP
from tests.fakes import Request, recorded
from tests.generation.one_at_a_time import FIXED, MAX_NEW, V, believed, generate_all, one_at_a_time, partly_right, results
from tests.shelf import MANY

pytestmark = pytest.mark.optimised


def test_references_hold_varied_texts():
    """A model that repeats itself would agree with everything."""
    texts = [one_at_a_time(request)[0] for request in FIXED]
    new = [text[len(request.prompt) :] for text, request in zip(texts, FIXED, strict=True)]
    assert [len(tokens) for tokens in new] == [MAX_NEW] * len(FIXED)
    assert min(len(set(tokens)) for tokens in new) >= MAX_NEW // 3
    assert len({token for tokens in new for token in tokens}) >= 50
    assert len(set(new)) == len(new)


def test_windows_of_one_row_commit_one_token_a_pass_without_any_draft():
    state = generate_all(MANY.alone, FIXED[:1], source="none")
    assert state.counters.num_verify_passes.tolist() == [MAX_NEW]
    for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_rollbacks", "num_recomputed_tokens"):
        assert getattr(state.counters, name).tolist() == [0]


@pytest.mark.parametrize("kind", ["perfect", "wrong", "empty"])
def test_draft_of_known_quality_changes_the_counters_and_no_bit(kind):
    """24 new tokens in windows of 8: three passes of 8 if every draft is right, 24 passes if none is or there is none."""
    rng = np.random.default_rng(0)
    expected = [one_at_a_time(request) for request in FIXED]
    told = recorded(MANY, [believed(kind, MANY, request, rng) for request in FIXED])
    state = generate_all(MANY, FIXED, source="recorded", told=told)
    assert results(state) == expected
    B = len(FIXED)
    passes, accepted, rollbacks = {"perfect": (3, 21, 0), "wrong": (24, 0, 23), "empty": (24, 0, 0)}[kind]
    assert state.counters.num_verify_passes.tolist() == [passes] * B
    assert state.counters.num_accepted_draft_tokens.tolist() == [accepted] * B
    assert state.counters.num_rollbacks.tolist() == [rollbacks] * B  # the last pass has no room for a draft


def test_neighbours_that_stop_early_or_are_ordinary_change_no_bit():
    """Some 24 of 211 tokens stop the second and third request; the fourth and fifth commit their drafts unverified."""
    stops = tuple(range(0, V, 9))
    requests = [FIXED[0], *(Request(r.prompt, dataclasses.replace(r.sampling, stop_token_ids=stops)) for r in FIXED[1:3])]
    ordinary = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=False)) for r in FIXED[3:]]
    expected = [one_at_a_time(request) for request in requests]
    assert [finish for _, _, finish in expected] == [LENGTH, STOP, STOP]
    told = [believed("partly right to the end", MANY, r, np.random.default_rng(0)) for r in (*requests, *ordinary)]
    state = generate_all(MANY, [*requests, *ordinary], source="recorded", told=recorded(MANY, told))
    found = results(state)
    assert found[:3] == expected
    assert found[3:] != [one_at_a_time(request) for request in FIXED[3:]]  # wrong drafts went in as they were
    assert state.counters.num_verify_passes[3:].tolist() == [1, 1]  # the very last token has no draft, so it was verified


def test_order_of_requests_permutes_the_results():
    tokens, length = partly_right(MANY, FIXED)
    straight = results(generate_all(MANY, FIXED, source="recorded", told=(tokens, length)))
    order = [3, 0, 4, 2, 1]
    permuted = generate_all(MANY, [FIXED[i] for i in order], source="recorded", told=(tokens[order], length[order]))
    assert results(permuted) == [straight[i] for i in order]
    assert len(set(straight)) == len(straight)  # else any order would do


# What a device certifies ----------------------------------------------------------------------------------------------------


def test_row_budgets_on_this_cpu_give_equal_bits():
    """Not promised: bits may depend on the number of rows of a pass. CPUs have given equal bits so far; should one not, then
    its certified set of budgets is smaller, and this test states which."""
    # A pass of one row multiplies vectors with matrices: it is the one most likely to differ.
    shapes = {rows: MANY._replace(schedule=MANY.schedule.with_budget(rows, 1)) for rows in (1, 64)}
    found = {rows: [one_at_a_time(FIXED[i], shape) for i in (1, 3)] for rows, shape in shapes.items()}
    assert {rows: answer == found[64] for rows, answer in found.items()} == dict.fromkeys(found, True)
