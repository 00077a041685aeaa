"""A draft model with weights and a cache of its own, and prompt lookup: neither needs a change outside this folder."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.draft.source import Drafter, DraftSource, draft_fn
from detspec.generation.insert import Entry, insert, pack_requests
from detspec.generation.loop import Step, dvr_step, generate_state
from detspec.generation.prefill import prefill
from detspec.generation.sequences import put_sequences, take_sequences
from detspec.model.params import Params, init_params
from detspec.state import Draft, GenState
from tests.draft.lookup import LOOKUP
from tests.draft.own_weights import draft_model
from tests.fakes import Request, random_model, state_of, table_model
from tests.generation.one_at_a_time import FIXED, one_at_a_time, results
from tests.shelf import MANY, TABLE

BF16, SCHEDULE = MANY.cfg, MANY.schedule
SMALL_CFG = dataclasses.replace(BF16, num_layers=1, num_heads=2, num_kv_heads=1, d_model=32, d_ff=48)
OTHER_SEED = 7


def start(requests, source: DraftSource) -> GenState:
    state = state_of(MANY, requests)
    return state.replace(draft=source.init(BF16, SCHEDULE, *state.tokens.shape))


def generated(source: DraftSource, draft_params: Params) -> tuple[list[tuple], float]:
    """What all of `FIXED` get, and the share of drafted tokens that were accepted."""
    state = state_of(MANY, FIXED)
    state = generate_state(random_model(BF16), BF16, state, schedule=SCHEDULE, source=source, draft_params=draft_params)
    drafted, accepted = state.counters.num_draft_tokens.sum(), state.counters.num_accepted_draft_tokens.sum()
    return results(state), float(accepted / drafted)


def expected() -> list[tuple]:
    return [one_at_a_time(request) for request in FIXED]


def test_draft_model_with_any_weights_commits_the_bits_of_no_draft():
    """Weights decide how much is accepted, and nothing else."""
    own, own_acceptance = generated(draft_model(BF16), random_model(BF16))
    other, other_acceptance = generated(draft_model(BF16), init_params(BF16, jax.random.key(OTHER_SEED)))
    assert own == expected()
    assert other == expected()
    assert own_acceptance > 0.9
    assert other_acceptance < 0.6


def leaking(draft_params, params, cfg, state: GenState, schedule) -> Draft:
    """A draft that changes the values of position 0, which is committed."""
    draft = draft_model(BF16).draft(draft_params, params, cfg, state, schedule)
    first = draft.cache.page_table[:, 0]
    spoilt = tuple(pool.at[first, :, 0].add(1) for pool in draft.cache.v)
    return draft.replace(cache=draft.cache.replace(v=spoilt))


def test_draft_that_writes_to_slots_of_committed_tokens_changes_bits():
    spoilt, _ = generated(draft_model(BF16)._replace(name="leaking", draft=leaking), random_model(BF16))
    assert spoilt != expected()


# Step by step ---------------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="source", donate_argnames="state")
def step(params: Params, draft_params: Params, state: GenState, *, source: DraftSource) -> tuple[GenState, Step]:
    """Prefills what is missing, then one step; what it drafted and verified without the caches."""
    state = prefill(params, BF16, state, schedule=SCHEDULE)
    drafted_by = draft_fn(Drafter(source, draft_params), SCHEDULE)
    state, done = dvr_step(params, BF16, state, draft_fn=drafted_by, schedule=SCHEDULE)
    return state, Step(done.draft.replace(cache=None, state=None), done.verified.replace(cache=None))


@partial(jax.jit, static_argnames="source")
def drafted_anew(params: Params, draft_params: Params, state: GenState, *, source: DraftSource) -> Draft:
    """What is drafted when the source knows nothing yet."""
    state = prefill(params, BF16, state, schedule=SCHEDULE)
    state = state.replace(draft=source.init(BF16, SCHEDULE, *state.tokens.shape))
    return source.draft(draft_params, params, BF16, state, SCHEDULE).replace(cache=None, state=None)


def put(state: GenState, place: int, request: Request, tokens=None, logprobs=()) -> GenState:
    prompt_len = len(request.prompt)
    entry = Entry(place, tokens or request.prompt, request.sampling, prompt_len=prompt_len, logprobs=logprobs)
    return insert(state, pack_requests(state, [entry], ()))


def interrupted(source: DraftSource, draft_params: Params) -> tuple[list[tuple], bool, int]:
    """Requests 0 to 4 of `FIXED` in three places: 3 preempts 1, which comes back in place 0, after 0 made room for 4.

    Returns results in the order of the requests, whether all drafts were those of a source that knows nothing yet, and
    rollbacks.
    """
    params = random_model(BF16)
    state, same, rollbacks = start(FIXED[:3], source), True, 0

    def advance(state: GenState, number: int) -> GenState:
        nonlocal same, rollbacks
        for _ in range(number):
            before = int(state.counters.num_rollbacks.sum())
            anew = drafted_anew(params, draft_params, state, source=source)
            state, done = step(params, draft_params, state, source=source)
            rollbacks += int(state.counters.num_rollbacks.sum()) - before
            used = np.arange(anew.tokens.shape[1]) < np.asarray(anew.count)[:, None]
            same &= np.array_equal(anew.count, done.draft.count)
            same &= np.array_equal(np.where(used, anew.tokens, 0), np.where(used, done.draft.tokens, 0))
        return state

    def text(state: GenState, place: int) -> tuple[list[int], list[float]]:
        n = int(state.committed[place])
        return state.tokens[place, :n].tolist(), state.logprobs[place, len(FIXED[1].prompt) : n].tolist()

    state = advance(state, 3)
    assert state.live[:3].all()
    preempted = text(state, 1)
    state = advance(put(state, 1, FIXED[3]), 2)
    while state.live[0]:
        state = advance(state, 1)
    zero = results(state)[0]
    state = advance(put(state, 0, FIXED[4]), 2)
    # Two of them on their own, in another order, on the same pools.
    chosen = jnp.asarray([2, 0])
    state = put_sequences(state, chosen, advance(take_sequences(state, chosen), 1))
    while state.live[0]:
        state = advance(state, 1)
    four = results(state)[0]
    state = put(state, 0, FIXED[1], *preempted)
    while state.live.any():
        state = advance(state, 1)
    one, three, two, *_ = results(state)
    return [zero, one, two, three, four], same, rollbacks


def credulous(draft_params, params, cfg, state: GenState, schedule) -> Draft:
    """A draft model that takes all it holds for committed, whatever was rejected or replaced."""
    held = state.draft.sequences
    held = held.replace(tokens=state.tokens, length=jnp.minimum(held.length, state.committed - 1))
    state = state.replace(draft=state.draft.replace(sequences=held))
    return draft_model(SMALL_CFG).draft(draft_params, params, cfg, state, schedule)


@pytest.mark.parametrize("believes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_draft_model_finds_by_itself_what_it_holds_of_committed_tokens(believes: bool):
    """After rollbacks, preemption and other requests in its place its drafts are those of one that reads all anew."""
    source = draft_model(SMALL_CFG)
    source = source._replace(draft=credulous) if believes else source
    found, same, rollbacks = interrupted(source, init_params(SMALL_CFG, jax.random.key(OTHER_SEED)))
    assert found == expected()
    assert rollbacks > 5
    assert same != believes  # the control: it would show


# Prompt lookup --------------------------------------------------------------------------------------------------------------


def test_lookup_drafts_what_followed_the_last_two_tokens_where_they_stood_last():
    prompts = [(5, 7, 9, 2, 5, 7, 3, 5, 7), (5, 7, 9, 2, 5, 7), (1, 2, 3), (4,), (6, 6, 6)]
    requests = [Request(prompt, FIXED[0].sampling) for prompt in prompts]
    state = state_of(TABLE, requests)
    state = state.replace(cache=state.cache.replace(length=state.committed - 1))
    draft = LOOKUP.draft((), table_model(), TABLE.cfg, state, TABLE.schedule)
    found = [tokens[:count] for tokens, count in zip(draft.tokens.tolist(), draft.count.tolist(), strict=True)]
    assert found == [[3, 5, 7], [9, 2, 5], [], [], [6]]


def test_lookup_commits_the_bits_of_no_draft():
    found, _ = generated(LOOKUP, ())
    assert found == expected()
