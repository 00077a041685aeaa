"""The doctor certifies what holds, and names the axis and layer of what does not."""

import dataclasses

import pytest

from detspec.bench.bench import random_model
from detspec.doctor.doctor import run_doctor
from detspec.doctor.examination import examine
from detspec.engine.policy import canonical_plans
from detspec.model.dense import with_fields
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import RANDOM_CFG

pytestmark = pytest.mark.slow
CFG = dataclasses.replace(RANDOM_CFG, max_position=128)  # the engine's programs are tried up to there
ONE_LAYER = with_fields(CFG, num_layers=1)  # where all has to be equal; what differs is told by layer 1


def test_doctor_canonical_schedule_certified() -> None:
    report = run_doctor(random_model(ONE_LAYER), schedule=Schedule(budget=Budget(8, 4)), max_requests=1)
    assert report.certified, report.table()
    axes = {check.axis for check in report.checks}
    assert axes == {
        *("run", "group index", "neighbours", "sequence", "page placement", "stale slots"),
        *("window offset", "split", "prefix rebuild"),
    }
    assert report.table().splitlines()[-1] == "certified"
    plans = {certificate.plan: certificate for certificate in report.plans}
    assert plans[canonical_plans(1, 8)[0]].is_certified


def test_examine_split_kv_in_canonical_pass_named() -> None:
    # Where the KV sequence is cut then follows the longest neighbour: a doctor that certified this would certify anything.
    # In float32, because rounding to bfloat16 hides most differences of a model this small.
    cfg = dataclasses.replace(CFG, dtype="float32")
    broken = Schedule(Numerics(page=4, num_splits=4), Budget(4, 2))
    checks, control = examine(random_model(cfg), broken)
    failed = {check.axis: check.differs for check in checks if not check.equal}
    assert "neighbours" in failed
    assert all("keys of layer 1" in differs for differs in failed.values())  # layer 0's keys do not depend on attention
    assert "group index" not in failed
    assert not control.equal


def test_doctor_window_alignment_leaves_out_offsets() -> None:
    schedule = Schedule(Numerics(alignment="window"), Budget(8, 4))
    report = run_doctor(random_model(ONE_LAYER), schedule=schedule, max_requests=1)
    assert report.certified, report.table()
    assert not {"window offset", "split"} & {check.axis for check in report.checks}
