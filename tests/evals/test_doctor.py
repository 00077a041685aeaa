"""The doctor certifies what holds, and names the axis and layer of what does not."""

import dataclasses

import jax
import pytest

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, Schedule
from detspec.engine.policy import canonical_plans
from detspec.evals.doctor import examine, run_doctor
from detspec.model.params import init_params

CFG = ModelConfig(
    vocab_size=97,
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=96,
    max_position=128,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CFG, init_params(CFG, jax.random.key(0)), None, (), "random")


def test_doctor_canonical_schedule_certified(model: Model) -> None:
    report = run_doctor(model, schedule=Schedule(rows=8, window=4), max_rows=2)
    assert report.certified, report.table()
    axes = {check.axis for check in report.checks}
    assert axes == {
        *("run", "group index", "neighbours", "cache row", "page placement", "stale slots"),
        *("window offset", "split", "prefix rebuild"),
    }
    assert report.table().splitlines()[-1] == "certified"
    plans = {certificate.plan: certificate for certificate in report.plans}
    assert plans[canonical_plans(2, 1, 8)[0]].equal


def test_examine_split_kv_in_canonical_pass_named() -> None:
    # Where the KV sequence is cut then follows the longest neighbour: a doctor that certified this would certify anything.
    # In float32, because rounding to bfloat16 hides most differences of a model this small.
    cfg = dataclasses.replace(CFG, dtype="float32")
    model = Model(cfg, init_params(cfg, jax.random.key(0)), None, (), "random")
    broken = Schedule(rows=8, window=4, page=4, num_splits=4)
    checks, control = examine(model, broken)
    failed = {check.axis: check.differs for check in checks if not check.equal}
    assert "neighbours" in failed
    assert all("keys of layer 1" in differs for differs in failed.values())  # layer 0's keys do not depend on attention
    assert "group index" not in failed
    assert not control.equal


def test_doctor_window_alignment_leaves_out_offsets(model: Model) -> None:
    schedule = Schedule(rows=8, window=4, alignment="window")
    report = run_doctor(model, schedule=schedule, max_rows=2)
    assert report.certified, report.table()
    assert not {"window offset", "split"} & {check.axis for check in report.checks}
