"""A program whose bits are not the anchor's is found out and not used."""

import dataclasses

import jax.numpy as jnp
import pytest

from detspec.checkpoint.load import Model
from detspec.engine.certify import certify
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Drafting, Needs, canonical_plans, needed_plans, ordinary_plan
from detspec.engine.probes import Probes
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, byte_params, facts, without_tokenizer

pytestmark = pytest.mark.optimised


def engine_of(model: Model, method: str) -> Engine:
    """An engine to spoil, its cache of a length that no other test uses: programs are kept by shape.

    A spoilt one must not be met by a sound engine; those of single rows are spoilt alike in both tests.
    """
    shape = {"max_requests": 2, "max_len": 73, "num_speculative_tokens": 3, "schedule": SCHEDULE}
    return Engine(model, EngineConfig(**shape, method=method))


def spoil(monkeypatch: pytest.MonkeyPatch, *, windows: bool) -> None:
    """Canonical passes of single rows, and with `windows` of all lengths, sum in the backend's own order."""

    def spoilt(self: Schedule, rows: int, window: int) -> Schedule:
        reductions = "native" if windows or window == 1 else "fixed"
        return dataclasses.replace(self, budget=Budget(rows, window)).with_numerics(reductions=reductions)

    monkeypatch.setattr(Schedule, "with_budget", spoilt)


@pytest.mark.slow
def test_certify_with_native_sums_in_the_canonical_pass_refuses_the_engine(model, monkeypatch):
    spoil(monkeypatch, windows=True)
    engine = engine_of(model, "none")
    with pytest.raises(InputError, match=r"does not certify the canonical pass at 2 sequences.*detspec doctor"):
        engine.generate([[1], [2]], SamplingParams(max_tokens=4))
    tried = [engine.certificates[plan] for plan in canonical_plans(2, SCHEDULE.budget.rows)]
    assert [certificate.plan.budget.rows for certificate in tried] == [2, SCHEDULE.budget.rows]
    for certificate in tried:
        assert certificate.status == "differs"
        assert "tokens after the prompt" in certificate.why
        assert "the anchor has" in certificate.why


@pytest.mark.slow
def test_engine_with_one_broken_plan_uses_the_other(model, one_row, monkeypatch):
    sampling = SamplingParams(max_tokens=8, temperature=0.8, seed=1)
    expected = [facts(c) for c in one_row.generate([[1, 2, 3], [4]], sampling)]
    monkeypatch.setattr("detspec.engine.planner.WORTH_DRAFTING", float("inf"))
    spoil(monkeypatch, windows=False)
    engine = engine_of(model, "auto")
    found = engine.generate([[1, 2, 3], [4]], sampling)
    assert not any(engine.certificates[plan].is_certified for plan in canonical_plans(2, SCHEDULE.budget.rows))
    assert engine.certificates[canonical_plans(2, SCHEDULE.budget.rows, Drafting("self", 4, 3))[0]].is_certified
    assert found[0].stats.num_draft_tokens > 0
    assert [facts(c) for c in found] == expected


def test_certify_of_sound_plans_finds_them_equal_and_times_them(three_rows):
    three_rows.prepare(3, Needs(processing=False))
    canonical = three_rows.certificates[canonical_plans(3, SCHEDULE.budget.rows, Drafting("self", 4, 3))[0]]
    assert (canonical.status, canonical.why) == ("certified", "")
    assert 0 < canonical.step_s < float("inf")
    assert three_rows.certificates[ordinary_plan(3)].status == "ordinary"
    needed = needed_plans(three_rows.config, three_rows.schedule, 4, Needs(processing=False))
    assert {plan for plan in three_rows.certificates if not plan.processing} <= set(needed)


def test_certify_leaves_no_trace_in_what_follows(model, one_row):
    """An engine that certifies in between gives what one does that certified before."""
    one_row.generate([[1]], SamplingParams(max_tokens=1))
    engine = Engine(model, one_row.config)
    first = engine.generate([[5, 6]], SamplingParams(max_tokens=6))
    assert facts(first[0]) == facts(one_row.generate([[5, 6]], SamplingParams(max_tokens=6))[0])
    assert engine.stats.num_verify_passes == 6  # the made-up requests are not counted
    assert not bool(jnp.any(engine.device.state.live))


FAR = SCHEDULE.with_numerics(page=64)


def engine_of_many_pages(method: str, max_len: int, max_requests: int = 1) -> Engine:
    """An engine of five pages of 64 for each request. A `max_len` of its own makes its programs its own."""
    model = dataclasses.replace(without_tokenizer(byte_params()), cfg=dataclasses.replace(BYTE_CFG, max_position=512))
    config = EngineConfig(max_requests=max_requests, max_len=max_len, method=method, num_speculative_tokens=3, schedule=FAR)
    engine = Engine(model, config)
    engine.device.prefills_apart = False  # one program that reads, as for a first answer
    return engine


@pytest.mark.slow
def test_sound_attention_is_certified_up_to_the_end_of_the_cache_and_over_borders_of_pages():
    engine = engine_of_many_pages("self", 319)
    for drafting in (Drafting(), Drafting("ngram", 4, 15, skips=True), Drafting("self", 4, 3)):
        assert certify(engine.device, canonical_plans(1, FAR.budget.rows, drafting)[0]).is_certified
    reached = [Probes(engine.device, 1, far=True, first=first) for first in range(2)]
    spans = [range(p.each[0].known, len(p.each[0].tokens) + p.num_new) for p in reached]
    assert max(span.stop for span in spans) == 319
    assert any(span.start // 64 < (span.stop - 1) // 64 for span in spans)
