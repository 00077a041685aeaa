"""A plan that was timed wrongly is found out while engines run."""

import dataclasses

from detspec.engine.certify import Certificate
from detspec.engine.engine import Engine
from detspec.engine.planner import Planner
from detspec.engine.policy import Plan, canonical_plans
from detspec.engine.request import Stats
from detspec.engine.step_times import StepTimes
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts

DECODING, DRAFTED = canonical_plans(8, 1, 64)[0], canonical_plans(8, 16, 64)[0]
TRUE_S = {DECODING: 0.010, DRAFTED: 0.400}  # 16 tokens a row in 0.160 s, or in 0.400


def test_step_times_follow_what_is_observed_and_one_slow_segment_counts_little():
    times = StepTimes()
    times.measured({DECODING: 0.010})
    times.observed(DECODING, 30.0)  # the process was stopped
    assert times.known(DECODING) <= 0.020
    times.observed(DECODING, 0.004)
    assert times.known(DECODING) == 0.004
    for _ in range(20):
        times.observed(DECODING, 0.016)
    assert abs(times.known(DECODING) - 0.016) < 1e-6


def test_step_times_of_a_plan_that_is_passed_over_are_hoped_to_be_less_until_it_runs():
    times = StepTimes()
    times.measured(TRUE_S)
    for _ in range(100):
        times.passed_over([DRAFTED])
    assert times.known(DRAFTED) == TRUE_S[DRAFTED]
    assert times.hoped(DRAFTED) < 0.4 * TRUE_S[DRAFTED]
    assert times.hoped(DECODING) == TRUE_S[DECODING]
    times.observed(DRAFTED, TRUE_S[DRAFTED])
    assert times.hoped(DRAFTED) == times.known(DRAFTED) == TRUE_S[DRAFTED]


def simulate(planner: Planner, segments: int) -> list[tuple[Plan, bool]]:
    """What is chosen for 8 rows in so many segments, each of which takes what it truly takes."""
    chosen = []
    for _ in range(segments):
        plan, trying = planner.choose(8, 0, Stats())
        planner.step_times.observed(plan, TRUE_S[plan])
        chosen.append((plan, trying))
    return chosen


def planner_of(eight_rows: Engine, step_s: dict[Plan, float]) -> Planner:
    """A planner that has two certified plans, and these times of them."""
    planner = Planner(eight_rows.model, eight_rows.schedule, eight_rows.config, num_pages=8)
    planner.certificates = {plan: Certificate(plan, equal=True, differs="") for plan in step_s}
    planner._batches = (8,)
    planner.step_times.measured(step_s)
    return planner


def test_planner_leaves_a_plan_that_seemed_fast_within_a_few_segments(eight_rows):
    chosen = simulate(planner_of(eight_rows, {DECODING: 0.010, DRAFTED: 0.020}), 20)
    assert chosen[0] == (DRAFTED, False)
    assert chosen[-10:] == [(DECODING, False)] * 10


def test_planner_comes_back_to_a_plan_that_seemed_slow_and_rarely_tries_one_that_is(eight_rows):
    chosen = simulate(planner_of(eight_rows, {DECODING: 0.080, DRAFTED: 0.400}), 1000)
    first = [plan for plan, _ in chosen].index(DECODING)
    assert 0 < first < 200
    assert chosen[first][1]  # for a few steps at first
    after = chosen[first + 1 :]
    assert all(trying for plan, trying in after if plan == DRAFTED)
    assert 1 <= sum(plan == DRAFTED for plan, _ in after) <= 0.02 * len(after)


def test_engine_times_the_plans_that_it_runs(three_rows, monkeypatch):
    """Whatever was believed of it before, and without a change of bits."""
    prompts, sampling = [[1], [2], [3]], SamplingParams(max_tokens=40, ignore_eos=True)
    monkeypatch.setattr(three_rows, "config", dataclasses.replace(three_rows.config, segment_steps=8))
    expected = [facts(completion) for completion in three_rows.generate(prompts, sampling)]
    times = three_rows.planner.step_times
    plan = canonical_plans(3, 4, three_rows.schedule.budget.rows)[0]
    for absurd in (1e-9, 1e9):
        times.measured({plan: absurd})
        for _ in range(20):  # a segment that ended before the host looked is not counted
            assert [facts(completion) for completion in three_rows.generate(prompts, sampling)] == expected
            if times.known(plan) != absurd:
                break
        assert times.known(plan) != absurd
