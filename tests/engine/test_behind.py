"""Plans that are made while requests run: what may run meanwhile, when they are tried, and that nothing changes but speed."""

from types import SimpleNamespace

import numpy as np
import pytest

from detspec.engine import planner, preparation
from detspec.engine.compiled import PROGRAMS, _wanted
from detspec.engine.device import PLAIN, GivenText
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.planner import PREFILL, REPLAYS
from detspec.engine.policy import Needs
from detspec.engine.programs import Placement
from detspec.errors import DivergenceError
from detspec.generation.score import Asked
from detspec.riders.rider import Entry
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
    assert [*(label for label in pieces[1:] if label != "no plan"), REPLAYS] == list(coming)
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
    monkeypatch.setattr(preparation, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    engine, device = fake_engine()
    engine.prepare_behind()
    certify = planner.Planner._certify
    monkeypatch.setattr(planner.Planner, "_certify", lambda *args: (clock.__setitem__(0, clock[0] + 2.0), certify(*args))[1])
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
    monkeypatch.setattr("detspec.engine.preparation.IMPROVED_AFTER", 20)
    engine, device = fake_engine()
    engine.compile_behind()
    engine.add(request_of("a", max_tokens=60), stream=True)
    while engine.has_work:
        engine.step()
    assert labels(engine) == ["1x1[1]"]
    assert engine.compiling == ("ordinary[1]", "1x4 ngram[1]")
    while not engine.is_prepared:
        device.compiled()
        engine.go_on_preparing()
    assert set(labels(engine)) >= {"1x1[1]", "ordinary[1]"}


def finish(engine: Engine, device: FakeDevice, *failing: str, error: Exception | None = None) -> None:
    """Makes all that is missing behind, but for plans whose labels are given, which cannot be compiled."""
    while not engine.is_prepared:
        plans, future = device.behind[-1]
        if any(plan.label in failing for plan in plans):
            future.set_exception(error or MemoryError("no room"))
        device.compiled()
        engine.go_on_preparing()


def check_it_counts(engine: Engine) -> None:
    """Deterministic and ordinary requests get their tokens."""
    for is_deterministic in (True, False):
        found = engine.generate([[1], [7]], SamplingParams(max_tokens=3, deterministic=is_deterministic))
        assert [completion.token_ids for completion in found] == [(2, 3, 4), (8, 9, 10)]


@pytest.mark.parametrize("label", ["ordinary processing[1]", "1x4 ngram processing[1]", "4x1 processing[4]"])
def test_plan_that_cannot_be_compiled_behind_is_put_aside_and_all_others_are_made(label, caplog):
    whole, _ = fake_engine()
    whole.prepare()
    engine, device = fake_engine()
    engine.prepare_behind()
    finish(engine, device, label)
    name = PREFILL if label == "4x1 processing[4]" else label  # that one was certified before, and is to be anew with prefill
    assert (engine.not_made, engine.compiling) == ((name,), ())
    assert f"{name} cannot be made" in caplog.text
    assert "MemoryError: no room" in caplog.text
    assert device.prefills_apart == (name != PREFILL)
    assert set(labels(whole)) - set(labels(engine)) <= {name}
    assert engine.certificates[next(iter(engine.certificates))].is_certified
    check_it_counts(engine)
    assert not engine.replicas[0].planner.lacks_any((1, 4), Needs())  # it is not tried again and again


def test_plan_whose_trial_raises_is_put_aside_and_plans_that_were_certified_stay(monkeypatch):
    certify = planner.certify

    def without_room(device, plan):
        if plan.batch == 1 or plan.draft == "ngram" or device.prefills_apart:
            raise MemoryError(plan.label)
        return certify(device, plan)

    monkeypatch.setattr(planner, "certify", without_room)
    engine, device = fake_engine()
    engine.prepare_behind()
    before = dict(engine.certificates)
    engine.add(request_of("a", max_tokens=40), stream=True)
    updates = engine.step()
    while engine.has_work or not engine.is_prepared:
        device.compiled()
        engine.go_on_preparing()
        updates += engine.step()
    assert tokens_of(updates) == counted(request_of("a", max_tokens=40))
    assert not device.prefills_apart
    assert engine.not_made[0] == PREFILL
    assert {label for label in engine.not_made if label.endswith("[1]")} >= {"ordinary processing[1]", "1x1 processing[1]"}
    assert before.keys() <= engine.certificates.keys()
    assert all(plan.batch == 4 for plan, found in engine.certificates.items() if found.is_certified)
    check_it_counts(engine)


def test_draft_without_room_for_what_it_keeps_and_times_that_fail_are_put_aside(monkeypatch):
    engine, device = fake_engine()
    compile_behind = device.compile_behind

    def without_room(plans, **how):
        if any(plan.draft == "ngram" for plan in plans):
            raise MemoryError("no room")
        return compile_behind(plans, **how)

    def cannot_time(device, plans):
        raise MemoryError("no room")

    monkeypatch.setattr(device, "compile_behind", without_room)
    monkeypatch.setattr(planner, "time_plans", cannot_time)
    engine.prepare_behind()
    finish(engine, device)
    assert {label for label in engine.not_made if "ngram" in label} == {
        label for label in engine.not_made if not label.startswith("times")
    }
    assert {"times processing[1]", "times processing[4]"} < set(engine.not_made)
    assert {"ordinary processing[1]", "1x1 processing[1]"} <= set(labels(engine))
    check_it_counts(engine)


def test_processes_or_chips_that_differ_behind_are_raised():
    engine, device = fake_engine()
    engine.prepare_behind()
    with pytest.raises(DivergenceError, match="a chip is at fault"):
        finish(engine, device, "ordinary processing[1]", error=DivergenceError("a chip is at fault"))


def test_what_requests_run_now_is_certified_anew_when_prefill_gets_its_own_program(monkeypatch):
    """Three requests come while the first piece is compiled for one."""
    monkeypatch.setattr("detspec.engine.preparation.IMPROVED_AFTER", 20)
    engine, device = fake_engine()
    engine.compile_behind()
    engine.add(request_of("a", max_tokens=60), stream=True)
    while not engine.compiling:
        engine.step()
    for start in (5, 20, 30):
        engine.add(request_of(f"b{start}", start=start, max_tokens=5))
    engine.step()
    assert labels(engine) == ["1x1[1]", "4x1[4]"]
    tried = []
    certify = planner.certify
    monkeypatch.setattr(planner, "certify", lambda device, plan: (tried.append(plan.label), certify(device, plan))[1])
    device.compiled()
    engine.go_on_preparing()
    assert device.prefills_apart
    assert tried == ["1x1[1]", "4x1[4]"]


def test_answers_are_the_same_bits_before_while_and_after_plans_are_made(model, monkeypatch):
    prompts = [list(range(30)), [7]]
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4)
    prepared = make_engine(model, 1, "none")
    prepared.prepare(needs=Needs(processing=False))
    expected = [facts(completion) for completion in prepared.generate(prompts, sampling)]
    engine = make_engine(model, 1, "none")
    monkeypatch.setattr(engine.device, "compile_replays", lambda: engine.device.compile_behind(()))  # no plans
    engine.prepare_behind(Needs(processing=False))
    found = []
    while not engine.is_prepared:
        found.append([facts(completion) for completion in engine.generate(prompts, sampling)])
        engine.go_on_preparing()
    found.append([facts(completion) for completion in engine.generate(prompts, sampling)])
    assert all(each == expected for each in found)
    assert len(found) > 2
    assert set(labels(engine)) == set(labels(prepared))


def test_room_that_grows_makes_all_plans_anew_behind_for_the_needs_of_before(monkeypatch):
    needs = Needs(processing=False)
    engine, device = fake_engine()
    engine.prepare_behind(needs)
    device.compiled()
    engine.go_on_preparing()
    coming = engine.compiling
    meanwhile = []
    certify = planner.certify
    monkeypatch.setattr(planner, "certify", lambda *args: (meanwhile.append(engine.compiling), certify(*args))[1])
    many = SamplingParams(max_tokens=4, stop_token_ids=tuple(range(60, 90)))
    found = engine.generate([[1]], many)
    assert found[0].token_ids == (2, 3, 4, 5)
    assert labels(engine) == ["4x1[4]"]
    assert {"4x1[4]", "ordinary[1]"} < set(meanwhile[0])
    assert engine.compiling == coming
    finish(engine, device)
    other, _ = fake_engine()
    other.prepare(needs=needs)
    assert set(labels(engine)) == set(labels(other))


def test_likeliest_tokens_are_compiled_at_last_and_a_failure_there_is_put_aside():
    engine, device = fake_engine()
    engine.prepare_behind()
    while engine.compiling != (REPLAYS,):
        device.compiled()
        engine.go_on_preparing()
    assert not engine.is_prepared
    device.behind[-1][1].set_exception(MemoryError("no room"))
    engine.go_on_preparing()
    assert engine.is_prepared
    assert (engine.not_made, engine.compiling) == ((REPLAYS,), ())
    check_it_counts(engine)


def test_programs_that_are_compiled_for_likeliest_tokens_are_those_that_run(model, monkeypatch):
    """By the keys that programs are looked up by: nothing is compiled here."""
    device = make_engine(model, 2, "none").device
    vocab_size = model.cfg.vocab_size
    calls = []
    monkeypatch.setattr(PROGRAMS, "start_behind", lambda some, cache: calls.extend(some))
    device.compile_replays()
    run = []
    monkeypatch.setattr(device, "_run", lambda call: (run.append(call), (device.state, None))[1])
    placement = Placement(np.ones((2, device.max_pages), np.int32), np.ones(2, bool), np.arange(2, dtype=np.int32))
    texts = {0: GivenText([1, 2, 3], 1, 2)}
    for processing in (False, True):
        for most in (0, 1, 2, 20):
            device.replay(placement, texts, Asked.likeliest(processing, most, vocab_size))
    device.replay(placement, texts, Asked.likeliest(False, 0, vocab_size), entries=[Entry(0, [1], SamplingParams())])
    keys = {_wanted(call).key for call in calls}
    assert len(keys) == 4
    assert keys == {_wanted(call).key for call in run}
    device.replay(placement, texts, PLAIN)
    assert _wanted(run[-1]).key not in keys  # the control
