"""Passes over prompts that give the token after each: the bits of a step, where that is certified, and a step less."""

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine import certify, policy
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.policy import Needs
from detspec.engine.programs import Report
from detspec.generation import prefill as prefill_module
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.engine.byte_model import byte_params, facts, make_engine, ordinary, some_prompts, some_sampling, without_tokenizer
from tests.thinking.fakes import THINKER_CFG, random_thinker

ON_CPU = Schedule(Numerics(page=16, linear="pinned", implementation="cpu"), Budget(16, 4))
NEEDS = Needs(processing=False)
PROMPTS = some_prompts(6)
FIRST = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return without_tokenizer(byte_params())


def engine_of(model: Model, method: str = "none", **changes) -> Engine:
    return make_engine(model, 3, method, **{"schedule": ON_CPU, "prefix_sharing": False, **changes})


def answering(model: Model, method: str = "none", **changes) -> Engine:
    engine = engine_of(model, method, **changes)
    engine.prepare(3, NEEDS)
    assert engine.device.answers
    return engine


@pytest.fixture(scope="module")
def expected(model) -> list:
    """Completions whose first tokens are those of steps."""
    engine = engine_of(model)
    assert not engine.device.answers  # certifying them takes time, so a first request does not wait for that
    return list(map(facts, engine.generate(PROMPTS, some_sampling(6))))


@pytest.fixture
def reports(monkeypatch) -> list[Report]:
    """Reports of all segments of steps."""
    noted: list[Report] = []
    step = Device.step

    def noting(*args, **named):
        noted.append(step(*args, **named))
        return noted[-1]

    monkeypatch.setattr(Device, "step", noting)
    return noted


def note_prefill(monkeypatch) -> list[tuple[int, bool]]:
    """Notes how many passes over prompts are started together from now on, and whether they answer."""
    noted: list[tuple[int, bool]] = []
    prefill = Device.prefill

    def noting(device, placement, passes, *, answers=False, **named):
        noted.append((passes, answers))
        return prefill(device, placement, passes, answers=answers, **named)

    monkeypatch.setattr(Device, "prefill", noting)
    return noted


def num_steps(reports: list[Report]) -> int:
    return sum(int(report.progress.steps[0]) for report in reports)


@pytest.mark.parametrize("method", ["none", "ngram", "self"])
def test_answered_prompts_have_the_bits_of_steps(model, expected, method):
    """No pass reads the prompt of one token."""
    assert min(map(len, PROMPTS)) == 1
    found = answering(model, method).generate(PROMPTS, some_sampling(6))
    assert list(map(facts, found)) == expected


def test_answered_prompt_takes_a_step_less(model, reports):
    num_taken = []
    for engine in (engine_of(model), answering(model)):
        engine.generate([PROMPTS[1]], FIRST)  # makes what it lacks
        reports.clear()
        [found] = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert found.stats.num_verify_passes == 9  # one of them read the prompt
        num_taken.append(num_steps(reports))
    assert num_taken == [9, 8]


def test_request_for_one_token_takes_no_step(model, reports):
    engine = answering(model)
    reports.clear()
    [found] = engine.generate([PROMPTS[1]], FIRST)
    assert reports == []
    assert facts(found) == facts(engine_of(model).generate([PROMPTS[1]], FIRST)[0])


def test_stream_has_the_first_token_before_there_is_a_step(model, expected, reports):
    engine = answering(model)
    reports.clear()
    engine.add(engine.request(PROMPTS[1], some_sampling(6)[1]), stream=True)
    while not (updates := engine.step()):
        assert reports == []
    assert updates[0].token_ids == expected[1][0][:1]
    assert len(reports) == 1  # the next token's, which is worked out while this one is looked at


def test_answer_that_is_a_stop_token_ends_its_request(model, expected, reports):
    first = expected[1][0][0]
    engine = answering(model)
    reports.clear()
    sampling = SamplingParams(max_tokens=9, temperature=0.8, seed=1, stop_token_ids=(first,))
    [found] = engine.generate([PROMPTS[1]], sampling)
    assert (found.token_ids, found.finish_reason) == ((first,), "stop")
    assert num_steps(reports) == 0


def test_prompts_are_answered_while_others_decode(model, expected, monkeypatch):
    engine = answering(model, max_prefill_passes=1)
    sampling = some_sampling(6)
    first = engine.request(PROMPTS[5], sampling[5], id="5")
    engine.add(first, stream=True)
    updates = []
    while not updates:
        updates = engine.step()
    noted = note_prefill(monkeypatch)
    for i in (1, 2, 3, 4):
        engine.add(engine.request(PROMPTS[i], sampling[i], id=str(i)))
    while engine.has_work:
        updates += engine.step()
    ended = {update.request.id: update.completion for update in updates if update.completion}
    assert {id: facts(each) for id, each in ended.items()} == {str(i): expected[i] for i in range(1, 6)}
    assert [passes for passes, answers in noted if answers] == [1] * len(noted)


def test_sequences_that_were_preempted_are_answered_once_more(model, expected, monkeypatch):
    engine = answering(model, num_pages=4)
    noted = note_prefill(monkeypatch)
    assert list(map(facts, engine.generate(PROMPTS, some_sampling(6)))) == expected
    assert engine.num_preemptions
    assert {answers for passes, answers in noted if passes} == {True}


def test_requests_that_process_logits_get_their_first_token_from_a_step(model, monkeypatch):
    engine = engine_of(model)
    engine.prepare(3, Needs())
    assert engine.device.answers
    sampling = [SamplingParams(max_tokens=4, temperature=1.0, top_p=0.5, logit_bias={7: 3.0}, seed=i) for i in range(6)]
    noted = note_prefill(monkeypatch)
    found = engine.generate(PROMPTS, sampling)
    assert list(map(facts, found)) == list(map(facts, engine_of(model).generate(PROMPTS, sampling)))
    assert {answers for _, answers in noted} == {False}


def test_ordinary_requests_are_answered_where_others_have_certified_it(model, monkeypatch):
    engine = answering(model)
    noted = note_prefill(monkeypatch)
    engine.generate(PROMPTS[1:], [ordinary(each) for each in some_sampling(6)[1:]])
    assert {answers for _, answers in noted} == {True}
    alone = engine_of(model)
    alone.prepare(3, Needs(deterministic=False, processing=False))
    assert not alone.device.answers


def test_prompts_that_are_thought_about_are_answered(reports):
    params = random_thinker(THINKER_CFG)
    thinker = Model(THINKER_CFG, params, tokenizer=None, eos_ids=(), digest=digest_model(THINKER_CFG, params))
    prompts = [[token % 200 for token in 2 * prompt] for prompt in PROMPTS]

    def thoughts_and_facts(engine: Engine) -> list:
        return [(each.thoughts, facts(each)) for each in engine.generate(prompts, SamplingParams(max_tokens=5))]

    engine = answering(thinker)
    assert any(thoughts for thoughts, _ in thoughts_and_facts(engine))
    assert thoughts_and_facts(engine) == thoughts_and_facts(engine_of(thinker))
    reports.clear()
    engine.generate([prompts[1]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert num_steps(reports) == 4


def spoil(monkeypatch) -> None:
    """Lets the input of the output head be a little off where passes over prompts answer, and nowhere else."""
    last_normed = prefill_module.last_normed

    def spoilt(*args, **named):
        normed = last_normed(*args, **named)
        return jnp.nextafter(normed, jnp.asarray(np.inf, normed.dtype))

    monkeypatch.setattr(prefill_module, "last_normed", spoilt)


def test_answers_of_other_bits_are_not_used(model, expected, monkeypatch):
    spoil(monkeypatch)
    engine = engine_of(model, max_len=80)  # other shapes than those of any program that was compiled before
    engine.prepare(3, NEEDS)
    assert not engine.device.answers
    noted = note_prefill(monkeypatch)
    assert list(map(facts, engine.generate(PROMPTS, some_sampling(6)))) == expected
    assert {answers for _, answers in noted} == {False}


def test_what_passes_answer_is_what_sequences_go_on_from(model, expected, monkeypatch):
    """The inverse control."""
    spoil(monkeypatch)
    monkeypatch.setattr("detspec.engine.planner.certifies_answers", lambda device: True)
    engine = answering(model, max_len=96)
    assert list(map(facts, engine.generate(PROMPTS, some_sampling(6)))) != expected


def test_large_passes_that_answer_otherwise_are_not_used(model, monkeypatch):
    """The cache is the same; what is committed is not."""
    monkeypatch.setattr(policy, "LARGE_ROWS", 64)
    engine = engine_of(model, max_len=112)
    bits_of = certify._bits_of
    seen = []

    def other_token_at_first(state, *args, **named):
        state = state if seen else state.replace(tokens=state.tokens.at[1, state.committed[1] - 1].add(1))
        seen.append(state)
        return bits_of(state, *args, **named)

    monkeypatch.setattr(certify, "_bits_of", other_token_at_first)
    engine.prepare(3, NEEDS)
    assert len(seen) == 2
    assert engine.device.answers
    assert not engine.device.prefills_large


def test_products_and_implementations_that_do_not_leave_out_rows_do_not_answer(model):
    assert not engine_of(model, schedule=ON_CPU.with_numerics(linear="xla")).device.may_answer
    assert not engine_of(model, schedule=ON_CPU.with_numerics(implementation="reference")).device.may_answer
