"""Requests that a model that thinks refuses: a clear error for each, before anything is compiled."""

import dataclasses

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.generation.checks import check_prompt
from detspec.generation.init import init_state, start_state
from detspec.generation.insert import pack_requests
from detspec.model.params import param_shapes, with_thinking
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from detspec.thinking.blocks import thinking_of
from tests.fakes import RANDOM_CFG

THINKING = ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=3, end_id=0)
CFG = dataclasses.replace(RANDOM_CFG, thinking=THINKING)
SCHEDULE = Schedule(Numerics(page=16), Budget(16, 4))


def make_state(schedule: Schedule = SCHEDULE, **changes):
    cfg = dataclasses.replace(CFG, thinking=dataclasses.replace(THINKING, **changes))
    return init_state(cfg, max_requests=1, max_len=32, max_stop_ids=1, max_logit_bias=1, schedule=schedule)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 6}, "chunk must be a power of two, got 6"),
        ({"in_layer": 2}, r"in_layer \(2\) must be less than its out_layer \(2\)"),
        ({"out_layer": 3}, r"out_layer \(3\) exceeds the model's 2 layers"),
        ({"end_id": 211}, r"end_id \(211\) lies outside the vocabulary of 211"),
        ({"max_thought": 0}, "max_thought must be an integer of at least 1, got 0"),
    ],
)
def test_config_of_no_sense_is_refused(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CFG, thinking=dataclasses.replace(THINKING, **changes))


def test_chunks_that_do_not_fit_the_budget_of_a_pass_are_refused():
    with pytest.raises(InputError, match="a canonical pass of 24 rows cannot be cut into chunks of 16 tokens"):
        make_state(Schedule(Numerics(page=32), Budget(24, 4)), chunk=16)


def test_chunk_and_thought_that_do_not_fit_a_page_are_refused():
    with pytest.raises(InputError, match=r"do not fit a page of 16 slots together: raise Numerics\.page to at least 19"):
        make_state(chunk=16, max_thought=4)
    make_state(chunk=8, max_thought=9)  # 8 + 9 - 1 slots


def test_aligned_windows_are_refused():
    with pytest.raises(InputError, match=r"needs Numerics\.alignment \"free\", got 'window'"):
        make_state(SCHEDULE.with_numerics(alignment="window"))


@pytest.mark.parametrize("thought", [[], [1, 2, 3, 0]])
def test_drafted_thought_of_no_or_too_many_tokens_is_refused(thought: list[int]):
    with pytest.raises(InputError, match=f"the drafted thought after chunk 1 of request 0 has {len(thought)} tokens"):
        pack_requests(make_state(), [Entry(0, [1] * 9, SamplingParams(), brings={"thoughts": [[0], thought]})], ())


def test_model_without_thinker_is_refused_where_thoughts_are_asked_for():
    with pytest.raises(InputError, match="no thinker and no compressor"):
        thinking_of(RANDOM_CFG)
    with pytest.raises(InputError, match="thinking is true, but the model has no thinker and no compressor"):
        check_prompt([1], SamplingParams(thinking=True), RANDOM_CFG, max_len=96)
    with pytest.raises(InputError, match="no thinker and no compressor"):
        ds.traces.run_thought_trace(ds.load(), "def f():", SamplingParams())


def test_weights_without_thinker_are_refused_for_a_config_that_thinks():
    from detspec.model.params import check_params

    with pytest.raises(InputError, match="thinking"):
        check_params(CFG, param_shapes(RANDOM_CFG))


def test_question_that_is_longer_than_the_cache_is_refused():
    with pytest.raises(InputError, match="the prompt has 30 tokens and max_tokens is 8, together more than the cache's"):
        start_state(CFG, [[1] * 30], [SamplingParams(max_tokens=8)], eos_ids=(), max_len=32, schedule=SCHEDULE)


def test_unknown_source_of_thoughts_is_refused():
    with pytest.raises(InputError, match=r"EngineConfig\.thoughts must be one of .*, got 'oracle'"):
        ds.EngineConfig(thoughts="oracle")


def test_thinker_and_compressor_start_as_copies_of_last_and_first_layer():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), param_shapes(RANDOM_CFG))
    cfg, thinking = with_thinking(RANDOM_CFG, params, THINKING)
    assert cfg == CFG
    assert jax.tree.structure(thinking) == jax.tree.structure(param_shapes(CFG))
    for name, like in (("thinker", params["layers"][-1]), ("compressor", params["layers"][0])):
        copied = thinking["thinking"][name]["layer"]
        assert all((np.asarray(copied[key]) == like[key]).all() for key in like)
    assert (np.asarray(thinking["thinking"]["thinker"]["head"]) == params["head"]).all()
