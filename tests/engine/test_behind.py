"""Plans that are made while requests run: what may run meanwhile, when they are tried, and that nothing changes but speed."""

from types import SimpleNamespace

import pytest

from detspec.engine import behind
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from tests.engine.byte_model import facts, make_engine
from tests.engine.fake_device import FakeDevice
from tests.engine.test_step import counted, request_of, tokens_of


def fake_engine() -> tuple[Engine, FakeDevice]:
    device = FakeDevice(Schedule(), EngineConfig(max_requests=4, max_len=256, method=("none", "ngram")))
    return Engine.over(device), device


def labels(engine: Engine) -> list[str]:
    return [plan.label for plan in engine.certificates]


def test_first_plan_runs_anything_and_the_others_are_those_of_prepare():
    engine, device = fake_engine()
    engine.prepare_behind()
    assert labels(engine) == ["4x1 processing[4]"]
    assert not device.prefills_apart
    coming = engine.compiling
    assert not engine.go_on_preparing()  # it is not compiled yet
    pieces = []
    while not engine.is_prepared:
        pieces += device.compiled()
        assert engine.go_on_preparing()
    assert pieces[0] == "4x1 processing[4]"  # certified anew, when prefill has got a program of its own
    assert [label for label in pieces[1:] if label != "no plan"] == list(coming)
    assert device.prefills_apart
    assert engine.compiling == ()
    assert not engine.go_on_preparing()
    other, _ = fake_engine()
    other.prepare()
    assert set(labels(engine)) == set(labels(other))
    assert {plan.label for plan, found in engine.certificates.items() if found.step_s < float("inf")} >= {
        plan.label for plan, found in other.certificates.items() if found.step_s < float("inf")
    }


def test_trials_hold_up_requests_for_a_tenth_of_the_time_and_change_no_token(monkeypatch):
    """A trial takes 2 s: while requests run the next one comes after 18 s, and at once when none does."""
    clock = [100.0]
    monkeypatch.setattr(behind, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    engine, device = fake_engine()
    engine.prepare_behind()
    certify = behind.Planner._certify
    monkeypatch.setattr(behind.Planner, "_certify", lambda *args: (clock.__setitem__(0, clock[0] + 2.0), certify(*args))[1])
    requests = [request_of("a", max_tokens=30), request_of("b", start=20, max_tokens=50)]
    for request in requests:
        engine.add(request, stream=True)  # a token a step
    updates = engine.step()
    device.compiled()
    assert engine.go_on_preparing()  # the first may come at once
    device.compiled()
    clock[0] += 17.9
    assert not engine.go_on_preparing()
    updates += engine.step()
    clock[0] += 0.2
    assert engine.go_on_preparing()
    while engine.has_work:
        updates += engine.step()
        device.compiled()
        clock[0] += 1.0
        engine.go_on_preparing()
    assert engine.num_preemptions >= 4
    for request in requests:
        assert tokens_of([update for update in updates if update.request.id == request.id]) == counted(request)
    device.compiled()
    assert engine.go_on_preparing()


def test_ordinary_requests_run_by_a_canonical_plan_until_theirs_is_there():
    engine, device = fake_engine()
    engine.prepare_behind()
    ordinary = SamplingParams(max_tokens=4, deterministic=False)
    engine.generate([[1]], ordinary)
    assert labels(engine) == list(device.steps_of) == ["4x1 processing[4]"]
    while not engine.is_prepared:
        device.compiled()
        engine.go_on_preparing()
    engine.generate([[1]], ordinary)
    assert "ordinary processing[1]" in device.steps_of
    lacking, _ = fake_engine()
    lacking.generate([[1]], ordinary)
    assert labels(lacking) == ["ordinary[1]"]  # the control: nothing is coming


def test_engine_that_makes_what_it_needs_makes_what_is_faster_behind(monkeypatch):
    monkeypatch.setattr("detspec.engine.engine.IMPROVED_AFTER", 20)
    engine, device = fake_engine()
    engine.compiles_behind = True
    engine.add(request_of("a", max_tokens=60), stream=True)
    while engine.has_work:
        engine.step()
    assert labels(engine) == ["1x1[1]"]
    assert engine.compiling == ("ordinary[1]", "1x4 ngram[1]")
    while not engine.is_prepared:
        device.compiled()
        engine.go_on_preparing()
    assert set(labels(engine)) >= {"1x1[1]", "ordinary[1]"}


def test_what_cannot_be_compiled_behind_is_raised():
    engine, device = fake_engine()
    engine.prepare_behind()
    device.behind[-1][1].set_exception(MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        engine.go_on_preparing()


def test_answers_are_the_same_bits_before_while_and_after_plans_are_made(model):
    prompts = [list(range(30)), [7]]
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4)
    prepared = make_engine(model, 1, "none")
    prepared.prepare(needs=Needs(processing=False))
    expected = [facts(completion) for completion in prepared.generate(prompts, sampling)]
    engine = make_engine(model, 1, "none")
    engine.prepare_behind(Needs(processing=False))
    found = []
    while not engine.is_prepared:
        found.append([facts(completion) for completion in engine.generate(prompts, sampling)])
        engine.go_on_preparing()
    found.append([facts(completion) for completion in engine.generate(prompts, sampling)])
    assert all(each == expected for each in found)
    assert len(found) > 2
    assert set(labels(engine)) == set(labels(prepared))


def test_room_that_grows_makes_all_plans_anew_behind():
    engine, device = fake_engine()
    engine.prepare_behind()
    device.compiled()
    engine.go_on_preparing()
    coming = engine.compiling
    many = SamplingParams(max_tokens=4, stop_token_ids=tuple(range(60, 90)))
    found = engine.generate([[1]], many)
    assert found[0].token_ids == (2, 3, 4, 5)
    assert labels(engine) == ["4x1 processing[4]"]
    assert engine.compiling == coming
    while not engine.is_prepared:
        device.compiled()
        engine.go_on_preparing()
    other, _ = fake_engine()
    other.prepare()
    assert set(labels(engine)) == set(labels(other))
