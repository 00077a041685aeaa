"""A user's rider changes texts, and no bit of a text depends on drafts, neighbours, places or preemptions."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.draft.draft_model import draft_model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.riders.rider import Committed, Rider
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import SCHEDULE, byte_params, facts, some_prompts, without_tokenizer
from tests.riders.turns import TURNS

NUM = 6
MODEL = without_tokenizer(byte_params())


def engine_of(method: str, riders: Sequence[Rider] = (TURNS,)) -> Engine:
    """Four places and pages for two of them, so that sequences are preempted half way; all engines share programs."""
    config = EngineConfig(max_requests=4, max_len=64, method=method, num_pages=8, num_speculative_tokens=3, schedule=SCHEDULE)
    drafters = {"model": draft_model(MODEL, target=MODEL)} if method == "model" else {}
    return Engine(MODEL, config, drafters=drafters, riders=riders)


def requests(brings: bool = True, **asks) -> list[Request]:
    """Greedy and sampled ones that bring different values, two that bring nothing, one with penalties, all of 30 tokens."""
    made = []
    for i, prompt in enumerate(some_prompts(NUM)):
        sampling = SamplingParams(max_tokens=30, temperature=(0.0, 0.8)[i % 2], seed=i, logprobs_mode="processed", **asks)
        if i == 4:
            sampling = dataclasses.replace(sampling, repetition_penalty=1.3)
        made.append(Request(str(i), tuple(prompt), sampling, brings={"turns": 6.0 + i} if brings and i not in (1, 3) else {}))
    return made


def run(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    return sorted(engine.run(asked), key=lambda completion: int(completion.id))


def one_by_one(engine: Engine) -> list[Completion]:
    """Each request by itself, one canonical row a pass."""
    return [run(engine, [request])[0] for request in requests()]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine without drafts; a test leaves nothing behind in it."""
    return engine_of("none")


@pytest.fixture(scope="module")
def alone(engine) -> list[Completion]:
    return one_by_one(engine)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("method", ["ngram", "self", "model"])
def test_texts_of_a_batch_with_drafts_and_preemptions_have_the_bits_of_each_alone(method, alone):
    engine = engine_of(method)
    found = run(engine, requests())
    assert [facts(c) for c in found] == [facts(c) for c in alone]
    assert [c.digest for c in found] == [c.digest for c in alone]
    assert engine.num_preemptions > 0
    assert engine.stats.num_accepted_draft_tokens > 0


@pytest.mark.slow
def test_what_is_brought_decides_texts_and_what_brings_nothing_is_as_without_riders(alone):
    """The inverse control: without the rider, the texts of those that bring something are others."""
    plain = run(engine_of("none", riders=()), requests(brings=False))
    for i, (without, with_it) in enumerate(zip(plain, alone, strict=True)):
        same = facts(without) == facts(with_it)
        assert same == (i in (1, 3))
        assert (without.digest == with_it.digest) == same


def test_scores_of_given_tokens_are_those_of_generation(alone, engine):
    asked = [
        dataclasses.replace(request, given_token_ids=completion.token_ids)
        for request, completion in zip(requests(logprobs=1), alone, strict=True)
    ]
    scored = run(engine, asked)
    assert [np.float32(c.logprobs).tobytes() for c in scored] == [np.float32(c.logprobs).tobytes() for c in alone]
    plain = run(engine, [dataclasses.replace(request, brings={}) for request in asked])
    assert plain[0].logprobs != alone[0].logprobs


@pytest.mark.slow
def test_replays_of_records_find_their_tokens_only_with_what_was_brought(alone, engine):
    found = engine.replay((request, c.token_ids) for request, c in zip(requests(), alone, strict=True))
    for replay, completion in zip(found, alone, strict=True):
        assert replay.targets[: len(completion.token_ids)].tolist() == list(completion.token_ids)
        expected = np.float32(completion.logprobs).tobytes()
        assert replay.logprobs[: len(completion.token_ids)].astype(np.float32).tobytes() == expected
    (plain,) = engine.replay([(requests(brings=False)[0], alone[0].token_ids)])
    assert plain.targets[: len(alone[0].token_ids)].tolist() != list(alone[0].token_ids)


def test_likeliest_tokens_of_greedy_texts_are_the_texts(alone, engine):
    asked = requests(logprobs=1)
    for request, completion, expected in zip(asked, run(engine, asked), alone, strict=True):
        assert completion.token_ids == expected.token_ids
        if request.sampling.temperature == 0:
            assert tuple(top[0][0] for top in completion.top_logprobs) == completion.token_ids
            assert [top[0][1] for top in completion.top_logprobs] == list(completion.logprobs)


def by_steps(state, committed: Committed):
    """The automaton after a step, which says nothing of the rows in between."""
    place = jnp.arange(committed.tokens.shape[1])[None, :]
    turns = (committed.tokens % 5 == 0) & (place < committed.num_new[:, None])
    return state.replace(is_on=state.is_on ^ (turns.sum(1) % 2 == 1))


@pytest.mark.slow
@pytest.mark.optimised
def test_rider_that_forgets_the_drafts_before_a_row_is_found_out(alone):
    """The inverse control of all of this: a state that only steps bring up to date."""
    naive = TURNS._replace(follow=None, observe=by_steps)
    assert [facts(c) for c in one_by_one(engine_of("none", riders=(naive,)))] == [facts(c) for c in alone]
    found = run(engine_of("self", riders=(naive,)), requests())
    assert [facts(c) for c in found] != [facts(c) for c in alone]


def test_values_that_no_rider_takes_are_refused(engine):
    request = requests()[0]
    with pytest.raises(InputError, match="turns must be a number, got 'much'"):
        engine.add(dataclasses.replace(request, brings={"turns": "much"}))
    with pytest.raises(InputError, match=r"brings 'grammar', but .* are those of its riders \('turns',\)"):
        engine.add(dataclasses.replace(request, brings={"grammar": 1}))
    with pytest.raises(InputError, match="brings 'turns', but the names that this engine takes are none"):
        engine_of("none", riders=()).add(request)
    with pytest.raises(InputError, match="two riders are called 'turns'"):
        engine_of("none", riders=(TURNS, TURNS))
    assert not engine.has_work
