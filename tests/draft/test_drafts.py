"""Draft sources on the model that counts up: how many tokens each drafts, and which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.draft.given import NONE, RECORDED
from detspec.draft.ngram import ngram
from detspec.draft.self_draft import INT8, SELF
from detspec.draft.source import draft_limit
from detspec.draft.table import source_of
from detspec.errors import InputError
from detspec.generation.prefill import prefill
from detspec.sampling_params import SamplingParams
from tests.fakes import TABLE_CFG, TABLE_LOGPROB, Request, state_of, table_model
from tests.shelf import TABLE

SCHEDULE = TABLE.schedule


@jax.jit
def caught_up(params, state):
    return prefill(params, TABLE_CFG, state, schedule=SCHEDULE)


@jax.jit
def by_model(params, state):
    return SELF.draft((), params, TABLE_CFG, state, SCHEDULE, 3)


def state_with(*samplings: SamplingParams, prompt=(1, 2, 3)):
    """A state of five sequences, of which the first ones have requests."""
    state = state_of(TABLE, [Request(prompt, sampling) for sampling in samplings])
    return caught_up(table_model(), state.with_processing(False))


def drafted(draft) -> list[list[int]]:
    return [row[:count] for row, count in zip(draft.tokens.tolist(), draft.count.tolist(), strict=True)]


def drafted_by_model(state):
    return by_model(table_model(), state)


def test_self_draft_drafts_up_to_the_window_the_limit_and_the_stop_token():
    """Limits 9 and 2 new tokens: a verified row drafts one less than it may still gain. Stop token 5 is drafted, no more."""
    state = state_with(
        SamplingParams(max_tokens=9), SamplingParams(max_tokens=2), SamplingParams(stop_token_ids=(5,), max_tokens=9)
    )
    draft = drafted_by_model(state)
    assert drafted(draft) == [[4, 5, 6], [4], [4, 5], [], []]
    assert draft.final.tolist() == [False] * 5


def test_self_draft_of_ordinary_rows_is_final_with_its_log_probabilities():
    """No token is added to it, so that it may draft the last token too."""
    state = state_with(SamplingParams(max_tokens=2, deterministic=False), SamplingParams(max_tokens=2))
    draft = drafted_by_model(state)
    assert drafted(draft) == [[4, 5], [4], [], [], []]
    assert draft.final.tolist() == [True, False, False, False, False]
    # float32 against float64 of 4 - log(e^4 + 15), numbers of size 4.
    np.testing.assert_allclose(np.asarray(draft.logprobs)[0, :2], TABLE_LOGPROB, rtol=0, atol=1e-6)


def test_self_draft_of_a_row_that_ended_is_empty():
    state = state_with(SamplingParams(max_tokens=9), SamplingParams(max_tokens=9))
    draft = drafted_by_model(state.replace(live=np.arange(5) == 1))
    assert drafted(draft) == [[], [4, 5, 6], [], [], []]


def test_self_draft_for_windows_without_room_is_refused():
    state = state_with(SamplingParams(max_tokens=2))
    with pytest.raises(InputError, match=r"room for at least 1 token .* got 0"):
        SELF.draft((), table_model(), TABLE_CFG, state, SCHEDULE, 0)


def test_recorded_draft_reads_on_from_the_committed_tokens():
    state = state_with(*[SamplingParams(max_tokens=9)] * 4)
    told = np.tile(np.arange(20, 28, dtype=np.int32), (5, 1))
    draft = RECORDED.draft((jnp.asarray(told), jnp.asarray([8, 5, 3, 0, 0])), None, TABLE_CFG, state, SCHEDULE, 3)
    assert drafted(draft) == [[23, 24, 25], [23, 24], [], [], []]
    assert draft.final.tolist() == [False] * 5


def test_no_draft_is_empty():
    for num_tokens in (0, 3):
        draft = NONE.draft((), None, TABLE_CFG, state_with(SamplingParams(max_tokens=2)), SCHEDULE, num_tokens)
        assert drafted(draft) == [[]] * 5
        assert draft.tokens.shape == (5, num_tokens)


def test_draft_limit_leaves_one_token_to_the_pass():
    """3 committed, 3 drafted tokens at most: limits 4, 5, 12 leave room for 1, 2, 9 tokens."""
    state = state_with(*[SamplingParams(max_tokens=n) for n in (1, 2, 9)])
    all_of_them, none_of_them = np.ones(5, bool), np.zeros(5, bool)
    assert draft_limit(state, 3, none_of_them).tolist() == [0, 1, 3, 0, 0]
    assert draft_limit(state, 3, all_of_them).tolist() == [1, 2, 3, 0, 0]
    assert draft_limit(state.replace(live=none_of_them), 3, none_of_them).tolist() == [0] * 5


def test_sources_are_found_by_name_and_unknown_names_are_refused():
    assert [source_of(name) for name in ("none", "ngram", "int8", "self")] == [NONE, ngram(), INT8, SELF]
    with pytest.raises(InputError, match=r"no draft source called 'oracle': choose one of \('none', 'ngram', 'int8', 'self'\)"):
        source_of("oracle")


def test_cost_of_a_draft_is_one_ordinary_step_a_token_or_nothing():
    assert SELF.cost_s(3, 0.5) == 1.5
    assert [source.cost_s(3, 0.5) for source in (NONE, RECORDED, ngram())] == [0, 0, 0]
    assert INT8.cost_s(3, 0.5) == 0.75  # half of the bytes
