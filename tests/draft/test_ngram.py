"""Prompt lookup: it finds what a plain search finds, counts what came of it, and changes no bit."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp

from detspec.draft import ngram as module
from detspec.draft.ngram import acceptance_by_match_length, ngram
from detspec.generation.loop import generate_state
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from tests.fakes import Request, random_model, state_of
from tests.generation.one_at_a_time import FIXED, one_at_a_time, results
from tests.shelf import MANY, TABLE

NUM_TOKENS = 5
LENGTH = TABLE.length


def searched(text: list[int], min_match: int = 2, max_match: int = 4) -> list[int]:
    """Tokens after the latest of the longest matches, by a plain search; a match that reaches the end repeats itself."""
    for n in range(max_match, min_match - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == text[len(text) - n :]:
                ahead = text[at:]
                return [ahead[i % len(ahead)] for i in range(NUM_TOKENS)]
    return []


def state_with(*texts: list[int]) -> GenState:
    requests = [Request(tuple(text), SamplingParams(max_tokens=LENGTH - len(text))) for text in texts]
    state = state_of(TABLE, requests).with_processing(False)
    draft = ngram().init(TABLE.cfg, TABLE.schedule, state)
    return state.replace(draft=draft, cache=state.cache.replace(length=state.committed - 1))


@jax.jit
def drafted_at_once(state: GenState):
    return ngram().draft((), None, TABLE.cfg, state, TABLE.schedule, NUM_TOKENS)


def drafted(state: GenState) -> list[list[int]]:
    draft = drafted_at_once(state)
    return [tokens[:count] for tokens, count in zip(draft.tokens.tolist(), draft.count.tolist(), strict=True)]


def test_draft_is_what_followed_the_last_tokens_where_they_stood_last():
    texts = [[5, 7, 9, 2, 5, 7, 3, 5, 7], [5, 7, 9, 2, 5, 7], [1, 2, 3], [4], [6, 6, 6]]
    assert drafted(state_with(*texts)) == [[3, 5, 7, 3, 5], [9, 2, 5, 7, 9], [], [], [6, 6, 6, 6, 6]]


@hypothesis.given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH - 1), min_size=5, max_size=5))
def test_draft_is_that_of_a_plain_search_up_to_the_limit(texts: list[list[int]]):
    expected = [searched(text)[: LENGTH - len(text) - 1] for text in texts]
    assert drafted(state_with(*texts)) == expected


def test_long_texts_are_searched_only_near_their_ends(monkeypatch):
    monkeypatch.setattr(module, "SEARCHED", 8)
    find = jax.jit(lambda state: ngram().draft((), None, TABLE.cfg, state, TABLE.schedule, NUM_TOKENS))
    near, far = [9, 8, 5, 7, 1, 3, 5, 7], [5, 7, 1, 3, 9, 8, 2, 2, 4, 5, 7]
    draft = find(state_with([0, *near], [0, 0, 0, *near], far))
    assert draft.count.tolist() == [NUM_TOKENS, NUM_TOKENS, 0, 0, 0]
    assert draft.tokens[:2].tolist() == [[1, 3, 5, 7, 1]] * 2


def test_drafts_that_came_true_make_matches_of_their_length_more_credible():
    """A match of 2 tokens, of whose drafts 3 of 4 agree, and one of 3 tokens, of which none does; both are counted once."""
    before = state_with([5, 7, 9, 2, 5, 7], [1, 2, 3, 4, 1, 2, 3])
    first = drafted_at_once(before)
    counters = before.counters.add(
        num_draft_tokens=jnp.int32([4, 4, 0, 0, 0]), num_accepted_draft_tokens=jnp.int32([3, 0, 0, 0, 0])
    )
    after = before.having(counters=counters).replace(committed=before.committed + jnp.int32([4, 1, 0, 0, 0]), draft=first.state)
    again = drafted_at_once(after)
    assert again.state.shared.tolist() == [[0, 0, 3, 0, 0], [0, 0, 1, 1, 0]]
    assert acceptance_by_match_length(again.state) == {2: 0.75, 3: 0.0}
    still = drafted_at_once(after.replace(draft=again.state))
    assert still.state.shared.tolist() == again.state.shared.tolist()
    other = after.replace(committed=after.committed + 1)  # another source has drafted since
    assert drafted_at_once(other).state.shared.tolist() == [[0] * 5, [0] * 5]
    # A text that ends in a match of 2 tokens is now believed more than it was, one of 3 less.
    assert drafted_at_once(before.replace(draft=again.state)).chance[0] > first.chance[0]
    assert drafted_at_once(before.replace(draft=again.state)).chance[1] < first.chance[1]


def test_lookup_commits_the_bits_of_no_draft():
    """Greedy and at random; prompts that repeat themselves, so that drafts are found, and most are wrong."""
    requests = [
        Request(r.prompt * 2, dataclasses.replace(r.sampling, top_k=0, top_p=1.0, min_p=0.0, max_tokens=12)) for r in FIXED
    ]
    state = state_of(MANY, requests).with_processing(False)
    state = generate_state(random_model(MANY.cfg), MANY.cfg, state, schedule=MANY.schedule, source=ngram(1, 3))
    assert results(state) == [one_at_a_time(request) for request in requests]
    assert state.counters.num_draft_tokens.sum() > 20
    assert state.counters.num_rollbacks.sum() > 5
