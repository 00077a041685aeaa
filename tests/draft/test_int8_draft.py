"""The model drafts for itself with its matrices in int8: most drafts agree at any temperature, and no bit changes."""

import dataclasses

import jax
import pytest

from detspec.draft.self_draft import INT8
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.generation.loop import generate_state
from detspec.model.params import init_params, quantized
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, facts, some_prompts, some_sampling
from tests.engine.fixed_times import FixedTimes
from tests.fakes import Request, random_model, state_of
from tests.generation.one_at_a_time import FIXED, one_at_a_time, results
from tests.shelf import MANY


@pytest.mark.slow
def test_int8_draft_commits_the_bits_of_no_draft_and_most_of_it_is_accepted():
    """Two of the requests are greedy, the others are drawn at T = 0.7, 1.3 and 1."""
    requests = [Request(r.prompt, dataclasses.replace(r.sampling, top_k=0, top_p=1.0, min_p=0.0)) for r in FIXED]
    params = random_model(MANY.cfg)
    state = state_of(MANY, requests).with_processing(False)
    weights = quantized(params, MANY.cfg)
    state = generate_state(params, MANY.cfg, state, schedule=MANY.schedule, source=INT8, draft_params=weights)
    assert results(state) == [one_at_a_time(request) for request in requests]
    drafted, accepted = int(state.counters.num_draft_tokens.sum()), int(state.counters.num_accepted_draft_tokens.sum())
    assert 0.6 * drafted < accepted  # random weights have close logits


@pytest.mark.slow
def test_int8_draft_of_an_engine_follows_its_weights(model, one_row):
    """Ordinary requests are verified, too: drafted tokens are no results. After an update the draft has the new weights."""
    config = EngineConfig(max_requests=3, max_len=64, method="int8", num_speculative_tokens=3, schedule=SCHEDULE)
    engine = Engine(model, config)
    sampling = [*some_sampling()[:-1], dataclasses.replace(some_sampling()[-1], deterministic=False)]
    found = engine.generate(some_prompts(), sampling)
    assert [facts(c) for c in found[:-1]] == [facts(c) for c in one_row.generate(some_prompts(), sampling)[:-1]]
    before = engine.stats
    assert before.draft_acceptance_rate > 0.6
    engine.update_params(init_params(BYTE_CFG, jax.random.key(9)))
    engine.generate(some_prompts(), sampling)
    drafted = engine.stats.num_draft_tokens - before.num_draft_tokens
    assert (engine.stats.num_accepted_draft_tokens - before.num_accepted_draft_tokens) > 0.6 * drafted


def test_int8_draft_of_a_model_in_int8_is_refused(model):
    cfg = dataclasses.replace(model.cfg, weights="int8")
    rounded = dataclasses.replace(model, cfg=cfg, params=quantized(model.params, model.cfg))
    with pytest.raises(InputError, match="the model itself is in int8"):
        Engine(rounded, EngineConfig(max_len=64, schedule=SCHEDULE, method="int8"))
    Engine(rounded, EngineConfig(max_len=64, schedule=SCHEDULE, method="none"))  # it runs in tests/engine/test_int8.py


@pytest.mark.slow
def test_of_several_draft_sources_an_engine_tries_each_and_the_bits_stay(model, one_row):
    config = EngineConfig(
        max_requests=3, max_len=64, method=("none", "ngram", "int8"), num_speculative_tokens=3, schedule=SCHEDULE
    )
    engine = Engine.over(Device(model, config), FixedTimes())  # the first start of a program may look like a slow one
    made = {
        certificate.plan.draft
        for certificate in engine.prepare(3)
        if certificate.is_certified and not certificate.plan.ordinary
    }
    assert made == {"none", "ngram", "int8"}
    found = engine.generate(some_prompts(), some_sampling())
    assert [facts(c) for c in found] == [facts(c) for c in one_row.generate(some_prompts(), some_sampling())]
    assert engine.stats.num_draft_tokens > 0
