"""A draft model: other weights, another config, and pools of its own that find by themselves what is still of use."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.load import Model
from detspec.config import ThinkingConfig
from detspec.draft.draft_model import MAX_PASSES, draft_model, draft_model_source, text_hashes
from detspec.draft.source import Drafter, DraftParams, DraftSource, draft_fn
from detspec.errors import InputError
from detspec.generation.insert import insert, pack_requests, put_sequences, take_sequences
from detspec.generation.loop import dvr_step, generate_state
from detspec.generation.prefill import prefill
from detspec.model.dense import with_fields
from detspec.model.params import Params, init_params
from detspec.riders.rider import Entry
from detspec.state import Draft, GenState
from tests.fakes import Request, random_model, state_of
from tests.generation.one_at_a_time import FIXED, one_at_a_time, results
from tests.shelf import MANY

BF16, SCHEDULE = MANY.cfg, MANY.schedule
SMALL_CFG = with_fields(BF16, num_layers=1, num_heads=2, num_kv_heads=1, d_model=32, d_ff=48)
OTHER_SEED = 7
COST = 0.25  # of a draft step in ordinary ones
# Without logits processing, a large part of a program, which a draft source leaves to others.
REQUESTS = [Request(r.prompt, dataclasses.replace(r.sampling, top_k=0, top_p=1.0, min_p=0.0)) for r in FIXED]


def generated(source: DraftSource, draft_params: DraftParams) -> tuple[list[tuple], float]:
    """Completions of all of `REQUESTS`, and the share of drafted tokens that were accepted."""
    state = state_of(MANY, REQUESTS).with_processing(False)
    state = generate_state(random_model(BF16), BF16, state, schedule=SCHEDULE, source=source, draft_params=draft_params)
    drafted, accepted = state.counters.num_draft_tokens.sum(), state.counters.num_accepted_draft_tokens.sum()
    return results(state), float(accepted / drafted)


def expected() -> list[tuple]:
    return [one_at_a_time(request) for request in REQUESTS]


def leaking(draft_params, params, cfg, state: GenState, schedule, num_tokens) -> Draft:
    """A draft of `draft_model_source(BF16, COST)` that, if asked to, changes the values of position 0, which is committed."""
    own_params, leaks = draft_params
    draft = draft_model_source(BF16, COST).draft(own_params, params, cfg, state, schedule, num_tokens)
    first = draft.cache.page_table[:, 0]
    spoilt = tuple(pools._replace(v=jnp.where(leaks, pools.v.at[first, :, 0].add(1), pools.v)) for pools in draft.cache.pools)
    return draft.replace(cache=draft.cache.replace(pools=spoilt))


LEAKING = draft_model_source(BF16, COST)._replace(name="leaking", draft=leaking)


@pytest.mark.slow
def test_draft_model_with_any_weights_commits_the_bits_of_no_draft():
    """Weights decide how much is accepted, and nothing else."""
    own, own_acceptance = generated(LEAKING, (random_model(BF16), np.bool_(False)))
    other, other_acceptance = generated(LEAKING, (init_params(BF16, jax.random.key(OTHER_SEED)), np.bool_(False)))
    assert own == expected()
    assert other == expected()
    assert own_acceptance > 0.9
    assert other_acceptance < 0.6


@pytest.mark.slow
def test_draft_that_writes_to_slots_of_committed_tokens_changes_bits():
    spoilt, _ = generated(LEAKING, (random_model(BF16), np.bool_(True)))
    assert spoilt != expected()


# Step by step ---------------------------------------------------------------------------------------------------------------


def credulous(draft_params, params, cfg, state: GenState, schedule, num_tokens) -> Draft:
    """A draft of `SMALL_CFG` that, if asked to, takes all that its pages hold for the committed texts."""
    own_params, believes = draft_params
    held = state.draft.shared
    place = jnp.arange(state.tokens.shape[1])
    pages = state.cache.page_table[:, place // held.hashes.shape[1]]
    believed = held.hashes.at[pages, place % held.hashes.shape[1]].set(text_hashes(state.tokens))
    held = held.replace(hashes=jnp.where(believes, believed, held.hashes))
    state = state.replace(draft=state.draft.replace(shared=held))
    return draft_model_source(SMALL_CFG, COST).draft(own_params, params, cfg, state, schedule, num_tokens)


CREDULOUS = draft_model_source(SMALL_CFG, COST)._replace(name="credulous", draft=credulous)


@partial(jax.jit, donate_argnames="state")
def step(
    params: Params, draft_params: DraftParams, state: GenState, chosen: jax.Array
) -> tuple[GenState, tuple[jax.Array, jax.Array]]:
    """Prefills what is missing, then one step of the sequences `chosen` on their own.

    Returns also what was drafted, and what is drafted by a source that knows nothing yet; 0 after their ends.
    """
    part = take_sequences(state, chosen).with_processing(False)
    part = prefill(params, BF16, part, schedule=SCHEDULE)
    forgot = part.replace(draft=CREDULOUS.init(BF16, SCHEDULE, part))
    anew = CREDULOUS.draft(draft_params, params, BF16, forgot, SCHEDULE, SCHEDULE.budget.window - 1)
    part, done = dvr_step(params, BF16, part, draft_fn=draft_fn(Drafter(CREDULOUS, draft_params), SCHEDULE), schedule=SCHEDULE)

    def used(draft: Draft) -> jax.Array:
        offset = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
        return jnp.where(offset < draft.count[:, None], 1 + draft.tokens, 0)

    return put_sequences(state, chosen, part), (used(done.draft), used(anew))


def put(state: GenState, place: int, request: Request, tokens=None, logprobs=()) -> GenState:
    prompt_len = len(request.prompt)
    entry = Entry(place, tokens or request.prompt, request.sampling, prompt_len=prompt_len, logprobs=logprobs)
    return insert(state, pack_requests(state, [entry], ()))


def interrupted(draft_params: DraftParams) -> tuple[list[tuple], bool, int]:
    """All of `REQUESTS` in three places: 3 preempts 1, which comes back in place 0, after 0 made room for 4.

    Returns results in the order of the requests, whether all drafts were those of a source that knows nothing yet, and
    rollbacks.
    """
    params = random_model(BF16)
    same, rollbacks = True, 0
    state = state_of(MANY, REQUESTS[:3])
    state = state.replace(draft=CREDULOUS.init(BF16, SCHEDULE, state))

    def advance(state: GenState, number: int, chosen=(0, 1, 2)) -> GenState:
        nonlocal same, rollbacks
        for _ in range(number):
            before = np.asarray(state.counters.num_rollbacks).sum()
            state, (drafted, anew) = step(params, draft_params, state, np.asarray(chosen, np.int32))
            rollbacks += int(np.asarray(state.counters.num_rollbacks).sum() - before)
            same &= np.array_equal(drafted, anew)
        return state

    def is_live(state: GenState, place: int) -> bool:
        return bool(np.asarray(state.live)[place])

    def text(state: GenState, place: int) -> tuple[list[int], list[float]]:
        tokens, logprobs, committed = jax.device_get((state.tokens, state.logprobs, state.committed))
        n = committed[place]
        return tokens[place, :n].tolist(), logprobs[place, len(REQUESTS[1].prompt) : n].tolist()

    state = advance(state, 3)
    assert np.asarray(state.live)[:3].all()
    preempted = text(state, 1)
    state = advance(put(state, 1, REQUESTS[3]), 2)
    while is_live(state, 0):
        state = advance(state, 1)
    zero = results(state)[0]
    state = advance(put(state, 0, REQUESTS[4]), 2)
    # Steps two of the sequences and a place that nothing is in, in another order.
    state = advance(state, 1, chosen=(2, 3, 0))
    while is_live(state, 0):
        state = advance(state, 1)
    four = results(state)[0]
    state = put(state, 0, REQUESTS[1], *preempted)
    while np.asarray(state.live).any():
        state = advance(state, 1)
    one, three, two, *_ = results(state)
    return [zero, one, two, three, four], same, rollbacks


@pytest.mark.slow
@pytest.mark.parametrize("believes", [False, True])
def test_draft_model_finds_by_itself_what_it_holds_of_committed_tokens(believes: bool):
    """After rollbacks, preemption and other requests in its place its drafts are those of one that reads all anew."""
    found, same, rollbacks = interrupted((init_params(SMALL_CFG, jax.random.key(OTHER_SEED)), np.bool_(believes)))
    assert found == expected()
    assert rollbacks > 5
    assert same != believes  # the control: it would show


# What is refused, and what is bounded ---------------------------------------------------------------------------------------


def named(cfg) -> Model:
    return Model(cfg, {}, None, (), "no weights")


def test_draft_model_of_another_vocabulary_or_one_that_thinks_is_refused():
    other = dataclasses.replace(SMALL_CFG, vocab_size=SMALL_CFG.vocab_size + 1)
    with pytest.raises(InputError, match=f"the draft model has {other.vocab_size} tokens, the model {BF16.vocab_size}"):
        draft_model(named(other), target=named(BF16))
    thinks = dataclasses.replace(SMALL_CFG, thinking=ThinkingConfig(4, 0, 1, 3, 1))
    with pytest.raises(InputError, match="a model that thinks cannot be a draft model"):
        draft_model(named(thinks), target=named(BF16))


def test_draft_is_believed_to_cost_its_share_of_the_weights_and_a_token_more_than_it_drafts():
    same = draft_model(named(BF16), target=named(BF16)).source
    small = draft_model(named(SMALL_CFG), target=named(BF16)).source
    rounded = draft_model(named(dataclasses.replace(SMALL_CFG, weights="int8")), target=named(BF16)).source
    assert same.cost_s(3, 0.5) == 2.0
    assert 0 < small.cost_s(3, 0.5) < 1.0
    assert rounded.cost_s(3, 0.5) == small.cost_s(3, 0.5) / 2


def test_hash_of_a_text_depends_on_each_of_its_tokens_and_on_their_places():
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 2, (512, 40)).astype(np.int32)
    hashes = np.asarray(text_hashes(jnp.asarray(texts)))
    for length in (7, 40):
        beginnings = {text[:length].tobytes() for text in texts}
        assert len(set(hashes[:, length - 1].tolist())) == len(beginnings)


NARROW = SCHEDULE.with_budget(16, 4)


@partial(jax.jit, static_argnames="source")
def drafted(source: DraftSource, draft_params: DraftParams, state: GenState) -> Draft:
    return source.draft(draft_params, None, BF16, state, NARROW, 3)


def test_long_text_is_read_in_a_few_passes_at_a_time_and_drafted_for_once_it_is_read():
    source = draft_model_source(SMALL_CFG, COST)
    prompts = np.random.default_rng(0).integers(1, BF16.vocab_size, (MANY.batch, MANY.length - 8)).tolist()
    num_starts = -(-sum(map(len, prompts)) // (MAX_PASSES * NARROW.budget.rows))
    assert num_starts > 2
    state = state_of(MANY, [Request(tuple(prompt), REQUESTS[0].sampling) for prompt in prompts]).with_processing(False)
    state = state.replace(cache=state.cache.replace(length=state.committed - 1))  # as if the target had read them
    state = state.replace(draft=source.init(BF16, SCHEDULE, state))
    params = init_params(SMALL_CFG, jax.random.key(OTHER_SEED))
    counts = []
    for _ in range(num_starts + 1):
        draft = drafted(source, params, state)
        counts.append(np.asarray(draft.count > 0).sum())
        state = state.replace(draft=draft.state)
    assert counts[0] < MANY.batch
    assert counts == sorted(counts)
    assert counts[-1] == MANY.batch
    # All that is held now is found again, by other sequences with the same texts and pages.
    again = drafted(source, params, state)
    np.testing.assert_array_equal(again.tokens, draft.tokens)
