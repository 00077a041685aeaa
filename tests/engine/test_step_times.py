"""A plan that was timed wrongly is found out while engines run."""

import dataclasses
import random

import pytest

from detspec.draft.table import drafters_of
from detspec.engine.certify import CERTIFIED, Certificate
from detspec.engine.decide import Acceptance, Load, StepTimes, choose_plan
from detspec.engine.engine_config import EngineConfig
from detspec.engine.planner import Planner
from detspec.engine.policy import Drafting, Needs, Plan, canonical_plans
from detspec.engine.programs import Report
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from tests.engine.byte_model import facts
from tests.engine.fake_device import FakeDevice

DECODING = canonical_plans(8, 64)[0]
DRAFTED = canonical_plans(8, 64, Drafting("self", 16, 15))[0]
LOAD = Load(8, 0, (), ready_deterministic=8, num_ready=8, waiting=False, processing=False)
LOOKUP = canonical_plans(8, 64, Drafting("ngram", 4, 3, skips=True))[0]
TRUE_S = {DECODING: 0.010, DRAFTED: 0.400}  # 16 tokens a row in 0.160 s, or in 0.400


def test_step_times_follow_what_is_observed_and_one_slow_segment_counts_little():
    times = StepTimes()
    times.measured({DECODING: 0.010})
    times.observed(DECODING, 30.0, 64)  # the process was stopped
    assert times.known(DECODING) <= 0.020
    times.observed(DECODING, 0.004, 64)
    assert times.known(DECODING) == 0.004
    for _ in range(20):
        times.observed(DECODING, 0.016, 64)
    assert abs(times.known(DECODING) - 0.016) < 1e-6


def test_step_times_of_a_plan_that_is_passed_over_are_hoped_to_be_less_until_it_runs():
    times = StepTimes()
    times.measured(TRUE_S)
    for _ in range(100):
        times.passed_over([DRAFTED], 64)
    assert times.known(DRAFTED) == TRUE_S[DRAFTED]
    assert times.hoped(DRAFTED) < 0.4 * TRUE_S[DRAFTED]
    assert times.hoped(DECODING) == TRUE_S[DECODING]
    times.observed(DRAFTED, TRUE_S[DRAFTED], 64)
    assert times.hoped(DRAFTED) == times.known(DRAFTED) == TRUE_S[DRAFTED]


def test_acceptance_begins_with_what_the_source_assumes_and_follows_what_is_verified():
    """SELF assumes 0.99: a window of 16 is expected to bring `1 + 0.99 + ... + 0.99^15` = 14.85 tokens."""
    acceptance = Acceptance(drafters_of())
    assert abs(acceptance.tokens(DRAFTED) - sum(0.99**i for i in range(16))) < 1e-12
    for _ in range(100):
        acceptance.observed(DRAFTED, windows=8, accepted=0)
    assert acceptance.tokens(DRAFTED) < 1.3
    for _ in range(100):
        acceptance.observed(DRAFTED, windows=8, accepted=8 * 7)
    assert abs(acceptance.tokens(DRAFTED) - 8) < 0.2


def chosen_by(planner: Planner, num_steps: int, load: Load = LOAD) -> tuple[Plan, bool]:
    """The plan that runs next for `num_steps`, and whether it is merely tried."""
    plan, is_trial, passed_over = choose_plan(load, planner.facts(1e-3))
    planner.step_times.passed_over(passed_over, num_steps)
    return plan, is_trial


def simulate(planner: Planner, segments: int) -> list[tuple[Plan, bool]]:
    """Plans chosen for 8 rows in so many segments, each of which takes its true time."""
    chosen = []
    for _ in range(segments):
        plan, trying = chosen_by(planner, 64)
        planner.step_times.observed(plan, TRUE_S[plan], 64)
        planner.acceptance.observed(plan, windows=8, accepted=8 * 15)
        chosen.append((plan, trying))
    return chosen


def planner_of(step_s: dict[Plan, float]) -> Planner:
    """A planner that has certified plans, and these times of them."""
    config = EngineConfig(max_requests=8, max_len=64, method="none")
    planner = Planner(FakeDevice(Schedule(), config))
    planner.prepare([8], Needs(processing=False))
    planner.certificates = {plan: Certificate(plan, CERTIFIED) for plan in step_s}
    planner.step_times.measured(step_s)
    return planner


def test_planner_leaves_a_plan_that_seemed_fast_within_a_few_segments():
    chosen = simulate(planner_of({DECODING: 0.010, DRAFTED: 0.020}), 20)
    assert chosen[0] == (DRAFTED, True)  # each draft shows once what it is worth
    assert chosen[1] == (DRAFTED, False)
    assert chosen[-10:] == [(DECODING, False)] * 10


def test_planner_comes_back_to_a_plan_that_seemed_slow_and_rarely_tries_one_that_is():
    chosen = simulate(planner_of({DECODING: 0.080, DRAFTED: 0.400}), 1000)
    first = [plan for plan, _ in chosen].index(DECODING)
    assert 0 < first < 200
    assert chosen[first][1]  # for a few steps at first
    after = chosen[first + 1 :]
    assert all(trying for plan, trying in after if plan == DRAFTED)
    assert 1 <= sum(plan == DRAFTED for plan, _ in after) <= 0.02 * len(after)


@pytest.mark.parametrize(("lookup_s", "best_s"), [(0.011, 0.010), (0.013, 0.010), (0.009, 0.009 / 1.03)])
def test_single_steps_of_random_times_cost_little_more_than_those_of_the_best_plan(lookup_s, best_s):
    """Streams: a token in 0.010 s, or 1.03 in `lookup_s`; a step in fifty is held up, and not all are timed."""
    rng = random.Random(0)
    true_s = {DECODING: 0.010, LOOKUP: lookup_s}
    planner = planner_of(true_s)
    took = tokens = 0.0
    for step in range(5000):
        planner.acceptance.observed(LOOKUP, windows=192, accepted=6)
        plan, _ = chosen_by(planner, 1)
        seconds = true_s[plan] * rng.lognormvariate(0, 0.1) * (4 if rng.random() < 0.02 else 1)
        if rng.random() < 0.7:
            planner.step_times.observed(plan, seconds, 1)
        if step >= 1000:
            took += true_s[plan]
            tokens += 1.03 if plan == LOOKUP else 1
    assert took / tokens < 1.01 * best_s


def test_engine_times_the_plans_that_it_runs(three_rows, monkeypatch):
    """Whatever was believed of it before, and without a change of bits.

    A segment that ended before the host looked is not counted, so the host always looks in time.
    """
    monkeypatch.setattr(Report, "is_ready", False)
    prompts, sampling = [[1], [2], [3]], SamplingParams(max_tokens=40, ignore_eos=True)
    monkeypatch.setattr(three_rows, "config", dataclasses.replace(three_rows.config, segment_steps=8))
    three_rows.prepare(3, Needs.of([sampling]))
    expected = [facts(completion) for completion in three_rows.generate(prompts, sampling)]
    times = three_rows.replicas[0].planner.step_times
    plan = canonical_plans(3, three_rows.schedule.budget.rows, Drafting("self", 4, 3))[0]
    for absurd in (1e-9, 1e9):
        times.measured({plan: absurd})
        for _ in range(20):  # what was passed over is tried now and then
            assert [facts(completion) for completion in three_rows.generate(prompts, sampling)] == expected
            if times.known(plan) != absurd:
                break
        assert times.known(plan) != absurd
