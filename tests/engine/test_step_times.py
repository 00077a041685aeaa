"""A plan that was timed wrongly is found out while engines run."""

import dataclasses
import random

import pytest

from detspec.draft.table import drafters_of
from detspec.engine.certify import CERTIFIED, Certificate
from detspec.engine.decide import FIRST_RUNS, Acceptance, Load, StepTimes, choose_plan
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
ALONE = canonical_plans(1, 64)[0]
LOOKUP = canonical_plans(8, 64, Drafting("ngram", 4, 3, skips=True))[0]
STREAMED = dataclasses.replace(LOAD, is_streamed=True)
TRUE_S = {DECODING: 0.010, DRAFTED: 0.400}  # 16 tokens a row in 0.160 s, or in 0.400


def test_step_times_follow_the_pace_and_one_slow_segment_counts_little():
    times = StepTimes()
    times.measured({DECODING: 0.010})
    times.observed(DECODING, 30.0, 64)  # the process was stopped
    assert times.known(DECODING) <= 0.020
    for seconds in (0.004, 0.016):
        for _ in range(20):
            times.observed(DECODING, seconds, 64)
        assert abs(times.known(DECODING) - seconds) < 1e-6


def test_step_times_of_a_plan_that_waits_follow_the_pace_of_the_one_that_runs():
    """Decoding takes a half of what lookup takes, while other work makes both three times as slow and ends again."""
    times = StepTimes()
    times.measured({DECODING: 0.010, LOOKUP: 0.020})
    for pace in (3.0, 1.0):
        for _ in range(20):
            times.observed(LOOKUP, 0.020 * pace, 64)
        assert abs(times.known(LOOKUP) - 0.020 * pace) < 1e-6
        assert abs(times.known(DECODING) - 0.010 * pace) < 1e-6


def test_step_times_of_plans_of_another_size_do_not_follow():
    times = StepTimes()
    times.measured({DECODING: 0.010, ALONE: 0.002})
    for _ in range(20):
        times.observed(DECODING, 0.030, 64)
    assert times.known(ALONE) == 0.002


def test_step_times_are_those_of_steps_that_followed_on_another_plans_and_the_median_counts():
    """Lookup was timed at twice the steps of decoding and takes 1.5 of them; one segment in four is held up or ends at once."""
    times = StepTimes()
    times.measured({DECODING: 0.010, LOOKUP: 0.020})
    for number in range(16):
        times.observed(DECODING, 0.010, 64)
        times.observed(DECODING, 0.010, 64)
        times.observed(LOOKUP, {0: 0.120, 2: 0.001}.get(number % 4, 0.015), 7 if number % 4 == 2 else 64)
    for _ in range(20):
        times.observed(DECODING, 0.010, 64)
    assert times.known(LOOKUP) / times.known(DECODING) == pytest.approx(1.5, rel=0.1)  # noise of single segments remains


def test_step_times_know_how_long_a_plan_has_waited_whether_steps_were_timed_or_not():
    times = StepTimes()
    times.measured({DECODING: 0.010, LOOKUP: 0.020})
    times.observed(DECODING, 0.010, 64)
    times.observed(DECODING, 0, 36)
    assert times.waited_s(LOOKUP) == pytest.approx(1.0, rel=1e-12)  # sums of floats
    assert times.waited_s(DECODING) == 0
    times.started(LOOKUP)
    assert times.waited_s(LOOKUP) == 0


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


def chosen_by(planner: Planner, load: Load = LOAD) -> Plan:
    """The plan that runs next."""
    plan = choose_plan(load, planner.facts(1e-3))
    planner.step_times.started(plan)
    return plan


def simulate(planner: Planner, segments: int) -> list[Plan]:
    """Plans chosen for 8 rows in so many segments, each of which takes its true time."""
    chosen = []
    for _ in range(segments):
        plan = chosen_by(planner)
        planner.step_times.observed(plan, TRUE_S[plan], 64 // plan.most_tokens)
        planner.acceptance.observed(plan, windows=8, accepted=8 * 15)
        chosen.append(plan)
    return chosen


def planner_of(step_s: dict[Plan, float], times: StepTimes | None = None) -> Planner:
    """A planner that has certified plans, and these times of them."""
    config = EngineConfig(max_requests=8, max_len=64, method="none")
    planner = Planner(FakeDevice(Schedule(), config))
    planner.prepare([8], Needs(processing=False))
    planner.certificates = {plan: Certificate(plan, CERTIFIED) for plan in step_s}
    planner.step_times = planner.step_times if times is None else times
    planner.step_times.measured(step_s)
    return planner


def test_planner_lets_plans_take_turns_and_leaves_one_that_seemed_fast():
    chosen = simulate(planner_of({DECODING: 0.010, DRAFTED: 0.020}), 20)
    assert chosen[: 2 * FIRST_RUNS] == [DECODING, DRAFTED] * FIRST_RUNS  # each shows what it is worth
    assert chosen[2 * FIRST_RUNS :] == [DECODING] * (20 - 2 * FIRST_RUNS)


def test_planner_comes_back_to_a_plan_that_seemed_slow_and_rarely_tries_one_that_is():
    """A trial of the draft takes 1.6 s instead of 0.64, so it is due once decoding has run for 192 s, 300 segments."""
    chosen = simulate(planner_of({DECODING: 0.080, DRAFTED: 0.400}), 1000)
    after = chosen[2 * FIRST_RUNS :]
    assert after[0] == DECODING
    assert 1 <= after.count(DRAFTED) <= len(after) / 300


class Believing(StepTimes):
    """Takes each plan's own latest time, however long ago and among whatever other work that was."""

    def observed(self, plan: Plan, seconds: float, num_steps: int) -> None:
        super().observed(plan, 0, num_steps)
        self._seconds[plan] = seconds or self._seconds[plan]


def cost_beside_other_work(times: StepTimes, tokens: float) -> float:
    """Time over that of the best plan, where lookup brings `tokens` a step and takes 1.45 times as long as decoding.

    Segments are up to four times as slow for a while, one in ten is held up, and of four in ten nobody knows the time. So it is
    on a machine that is used by others, which made lookup run on where it brings 1.06 tokens or 1.2.
    """
    rng = random.Random(1)
    true_s = {DECODING: 0.010, LOOKUP: 0.0145}
    planner = planner_of({DECODING: 0.013, LOOKUP: 0.0145}, times)
    took = gained = 0.0
    pace = 1.0
    for number in range(2000):
        pace = rng.choice((1.0, 1.5, 4.0)) if number % 30 == 0 else pace
        plan = chosen_by(planner)
        gain = tokens if plan == LOOKUP else 1.0
        held_up = 5 if rng.random() < 0.1 else 1
        seconds = 0 if rng.random() < 0.4 else true_s[plan] * pace * held_up * rng.lognormvariate(0, 0.1)
        planner.step_times.observed(plan, seconds, round(64 / gain))
        planner.acceptance.observed(plan, windows=round(64 / gain), accepted=round(64 / gain * (gain - 1)))
        if number >= 200:
            took += true_s[plan] * 64 / gain
            gained += 64
    return took / gained / min(true_s[DECODING], true_s[LOOKUP] / tokens)


COSTS_LITTLE = 1.03  # trials cost up to 0.5 %, comparisons with segments that were held up the rest


@pytest.mark.parametrize("tokens", [1.06, 1.2, 2.0])
def test_other_work_on_the_machine_costs_little(tokens):
    assert cost_beside_other_work(StepTimes(), tokens) < COSTS_LITTLE


@pytest.mark.parametrize("tokens", [1.2, 2.0])
def test_other_work_costs_more_where_each_time_is_believed(tokens):
    """The control; with 1.06 tokens plans are so far apart that any times tell them apart."""
    assert cost_beside_other_work(Believing(), tokens) > COSTS_LITTLE


@pytest.mark.parametrize(("lookup_s", "best_s"), [(0.011, 0.010), (0.013, 0.010), (0.009, 0.009 / 1.03)])
def test_single_steps_of_random_times_cost_little_more_than_those_of_the_best_plan(lookup_s, best_s):
    """Streams: a token in 0.010 s, or 1.03 in `lookup_s`; a step in fifty is held up, and not all are timed."""
    rng = random.Random(0)
    true_s = {DECODING: 0.010, LOOKUP: lookup_s}
    planner = planner_of(true_s)
    took = tokens = 0.0
    for step in range(5000):
        planner.acceptance.observed(LOOKUP, windows=192, accepted=6)
        plan = chosen_by(planner, STREAMED)
        seconds = true_s[plan] * rng.lognormvariate(0, 0.1) * (4 if rng.random() < 0.02 else 1)
        planner.step_times.observed(plan, seconds if rng.random() < 0.7 else 0, 1)
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
