"""A first answer waits for few programs; others are made once an engine has run for a while."""

import pytest

from detspec.engine.certify import NOT_TRIED, time_plans
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, ordinary_plan
from detspec.engine.programs import prefill_sequences, read_sequences
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.thinking.rider import thinking_rider
from tests.engine.byte_model import SCHEDULE, facts, make_engine
from tests.engine.fake_device import FakeDevice
from tests.engine.test_step import counted, make, request_of, tokens_of

PLAIN = SamplingParams(max_tokens=12, temperature=0.9, seed=4)
BIASED = SamplingParams(max_tokens=12, logit_bias=dict.fromkeys(range(1900, 1950), -100.0))


def labels(engine: Engine) -> set[str]:
    return {plan.label for plan in engine.certificates}


@pytest.fixture
def engine() -> Engine:
    return Engine.over(FakeDevice(Schedule(), EngineConfig(max_requests=4, max_len=256, prefix_sharing=False)))


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (Needs(deterministic=True, ordinary=False, processing=False), {"4x1[4]"}),
        (Needs(deterministic=False, ordinary=True, processing=False), {"ordinary[4]"}),
        (Needs(deterministic=True, ordinary=True, processing=False), {"4x1[4]", "ordinary[4]"}),
        (Needs(deterministic=True, ordinary=False, processing=True), {"4x1 processing[4]"}),
    ],
)
def test_first_only_makes_one_plan_of_each_kind_that_is_needed(needs, expected, engine):
    engine.prepare(3, needs, first_only=True)
    assert labels(engine) == expected
    more = {certificate.plan.label for certificate in engine.prepare(3, needs)}
    assert more >= expected
    assert any(label.startswith("ordinary") for label in more)


def test_drafts_and_smaller_batches_are_made_once_many_steps_have_run(monkeypatch):
    """Two requests share the larger batch, then one goes on alone: a batch gets its plans once it was needed for long."""
    monkeypatch.setattr("detspec.engine.preparation.IMPROVED_AFTER", 20)
    engine = make(max_requests=4)
    requests = [request_of("a", max_tokens=25), request_of("b", start=20, max_tokens=55)]
    for request in requests:
        engine.add(request)
    updates = engine.step()
    assert labels(engine) == {"4x1[4]"}
    while not any(update.completion for update in updates):
        updates += engine.step()
    assert labels(engine) == {"4x1[4]", "ordinary[4]"}
    while engine.has_work:
        updates += engine.step()
    assert labels(engine) == {"1x1[1]", "4x1[4]", "ordinary[1]", "ordinary[4]"}
    assert engine.num_preemptions >= 2
    for request in requests:
        assert tokens_of([update for update in updates if update.request.id == request.id]) == counted(request)


def test_engine_that_was_prepared_makes_nothing_more_by_itself(monkeypatch):
    monkeypatch.setattr("detspec.engine.preparation.IMPROVED_AFTER", 20)
    engine = make(max_requests=4)
    prepared = {certificate.plan.label for certificate in engine.prepare(4, Needs(processing=False))}
    engine.add(request_of("a", max_tokens=50))
    while engine.has_work:
        engine.step()
    assert labels(engine) == prepared == {"4x1[4]", "ordinary[4]"}
    assert engine.num_preemptions == 0


def test_plans_of_a_batch_are_timed_again_only_with_a_new_one_among_them(engine, monkeypatch):
    """A draft that cannot win, and a second call, leave nothing to time."""
    noted: list[frozenset] = []

    def noting(device: FakeDevice, plans: list) -> dict:
        noted.append(frozenset(plans))
        return time_plans(device, plans)

    monkeypatch.setattr("detspec.engine.planner.time_plans", noting)
    engine.prepare(4, Needs(processing=False))
    engine.prepare(4, Needs(processing=False))
    assert noted
    assert len(set(noted)) == len(noted)
    timed = {certificate.plan for certificate in engine.certificates.values() if certificate.status != NOT_TRIED}
    assert noted[-1] == timed


@pytest.mark.slow
@pytest.mark.parametrize("linear", ["pinned", "xla"])
def test_prefill_gets_a_program_of_its_own_with_the_other_plans_if_products_are_pinned_and_answers_stay(model, linear):
    """XLA may cut the last layer's product of keys and values in another way where nothing else is worked out."""
    schedule = SCHEDULE.with_numerics(linear=linear)
    engine = make_engine(model, 3, "none", prefix_sharing=False, schedule=schedule)
    prompts = [list(range(30)), [7]]
    expected = [facts(completion) for completion in engine.generate(prompts, PLAIN)]
    assert not engine.device.prefills_apart
    engine.prepare(3, Needs(processing=False))
    assert engine.device.prefills_apart == (linear == "pinned")
    assert labels(engine) == {"3x1[3]", "ordinary[3]"}
    assert [facts(completion) for completion in engine.generate(prompts, PLAIN)] == expected


@pytest.mark.parametrize(("linear", "fn"), [("pinned", prefill_sequences), ("xla", read_sequences)])
def test_ordinary_requests_have_a_program_that_prefills(model, linear, fn):
    """It is compiled with theirs, not at the first request."""
    engine = make_engine(model, 3, "none", schedule=SCHEDULE.with_numerics(linear=linear))
    engine.device.prefills_apart = engine.device.may_prefill_apart
    called = [call.fn for call in engine.device.calls([ordinary_plan(3)])]
    assert [each for each in called if each in (prefill_sequences, read_sequences)] == [fn]


def test_thoughts_are_certified_anew_when_prefill_gets_its_own_program(engine, monkeypatch):
    """Prompts are thought about by the program that prefills. What certifies them notes whether that is one of its own."""
    noted: list[bool] = []

    def certify_reader(device: FakeDevice, batch: int) -> str:
        noted.append(device.prefills_apart)
        return ""

    monkeypatch.setattr("detspec.engine.planner.certify_reader", certify_reader)
    engine.device.riders = (thinking_rider(),)
    needs = Needs(ordinary=False, processing=False)
    engine.prepare(1, needs, first_only=True)
    engine.prepare(4, needs, first_only=True)  # another batch, the same program of prefill
    assert noted == [False]
    engine.prepare(4, needs)
    engine.prepare(4, needs)
    assert noted == [False, True]


@pytest.mark.slow
def test_answers_are_those_of_programs_with_and_without_logits_processing(model):
    """A request that needs none has the same bits among requests that do; the control: processing is what makes the others."""
    alone = make_engine(model, 3, "none")
    expected = [facts(completion) for completion in alone.generate([[1, 2, 3], [7]], PLAIN)]
    assert labels(alone) == {"3x1[3]"}
    together = make_engine(model, 3, "none")
    found = together.generate([[1, 2, 3], [7]], [PLAIN, BIASED])
    assert labels(together) == {"3x1 processing[3]"}
    assert facts(found[0]) == expected[0]
    assert facts(together.generate([[7]], PLAIN)[0]) == expected[1]  # by the program that is there
    assert labels(together) == {"3x1 processing[3]"}
    assert alone.generate([[7]], SamplingParams(max_tokens=12))[0].token_ids[0] == 1923
    assert found[1].token_ids[0] != 1923
    assert facts(alone.generate([[7]], BIASED)[0]) == facts(found[1])
    assert labels(alone) == {"3x1[3]", "1x1 processing[1]"}
