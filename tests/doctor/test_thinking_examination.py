"""The doctor's examination of reading with thoughts: it passes what holds and names what does not."""

import dataclasses

import pytest

from detspec.checkpoint.load import Model
from detspec.doctor import doctor
from detspec.doctor.examination import Check
from detspec.doctor.thinking_examination import examine_thoughts
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import RANDOM_CFG
from tests.thinking.fakes import THINKER_CFG, random_thinker

AXES = ["drafted thoughts", "reading places", "reading pages"]


# In float32, because rounding to bfloat16 hides most differences of a model this small.
CFG = dataclasses.replace(THINKER_CFG, dtype="float32")


def thinker() -> Model:
    return Model(CFG, random_thinker(CFG), tokenizer=None, eos_ids=(), digest="")


@pytest.mark.slow
def test_examine_thoughts_of_a_canonical_schedule_hold_on_every_axis():
    checks = examine_thoughts(thinker(), Schedule(Numerics(page=16), Budget(16, 4)))
    assert [check.axis for check in checks] == AXES
    assert [check.num_variants for check in checks] == [3, 4, 2]
    assert all(check.equal for check in checks), checks


@pytest.mark.slow
def test_examine_thoughts_where_the_sum_depends_on_the_pass_names_layer_and_position():
    # The keys' sequence is cut by the furthest place of a pass, and how many chunks of a prompt a pass holds depends on its
    # neighbours.
    broken = Schedule(Numerics(page=8, num_splits=4), Budget(16, 4))
    failed = {check.axis: check.differs for check in examine_thoughts(thinker(), broken) if not check.equal}
    assert "keys of layer 1 at position" in failed["reading places"]
    assert "reading pages" not in failed


def test_examine_thoughts_of_a_model_that_does_not_think_is_nothing():
    model = Model(RANDOM_CFG, {}, tokenizer=None, eos_ids=(), digest="")
    assert examine_thoughts(model, Schedule(budget=Budget(16, 4))) == ()


def test_doctor_that_finds_thoughts_to_vary_reports_it_and_leaves_the_engine_out(monkeypatch):
    control = Check("inverse control", "", 1, "batch 1: logits")
    varies = Check("reading places", "what others read", 4, "sequence 1 alone: the state at place 0")
    monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: ((Check("run", "", 1, ""),), control))
    monkeypatch.setattr(doctor, "examine_thoughts", lambda *args, **kwargs: (varies,))
    report = doctor.run_doctor(thinker(), schedule=Schedule(budget=Budget(16, 4)), max_requests=1)
    assert not report.certified
    assert report.plans == ()
    lines = report.table().splitlines()
    assert any("reading places" in line and "NO: sequence 1 alone: the state at place 0" in line for line in lines)
    assert lines[-3].endswith("not examined: an engine refuses a model whose thoughts vary")
    assert lines[-1].startswith("NOT CERTIFIED")
