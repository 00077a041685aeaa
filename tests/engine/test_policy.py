"""Which plan is chosen, worked out by hand."""

import itertools
import math

import pytest

from detspec.engine.decide import MAX_ROUNDS, Costs, Load, Segment, choose, empty_windows, plan_segment, segment_length
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import (
    Drafting,
    Needs,
    Plan,
    allowed_drafts,
    buckets,
    canonical_plans,
    needed_plans,
    ordinary_plan,
    pow2_ceil,
    worth_making,
)
from detspec.generation.loop import NEVER
from detspec.schedule import Budget, Numerics, Schedule

NONE = Drafting()
NGRAM = Drafting("ngram", 4, 15, skips=True)
SELF = Drafting("self", 16, 15)


def plan_of(batch: int, window: int, rows: int = 64) -> Plan:
    return canonical_plans(batch, rows, Drafting("self", window, window - 1))[0]


def windows(batch: int, seconds: dict[int, float]) -> dict[Plan, float]:
    """Plans of these windows, each with the seconds of its step."""
    return {plan_of(batch, w): s for w, s in seconds.items()}


def test_choose_takes_the_most_tokens_per_second():
    """Tokens a millisecond by window 1 / 4 / 16. Acceptance 0.99: .10 .25 .37; 0.6: .10 .14 .06; 0.05: .10 .07 .03."""
    plans = windows(1, {1: 0.010, 4: 0.016, 16: 0.040})
    for acceptance, window in ((0.99, 16), (0.6, 4), (0.05, 1)):
        tokens = {plan: sum(acceptance**i for i in range(plan.budget.window)) for plan in plans}
        for order in itertools.permutations(plans):
            assert choose({plan: plans[plan] for plan in order}, tokens).budget.window == window


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        ({"method": "none"}, (), (NONE,)),
        ({"method": "self"}, (), (SELF,)),
        ({"method": "ngram", "num_speculative_tokens": 1}, (), (Drafting("ngram", 2, 1, skips=True),)),
        ({"method": "small", "num_speculative_tokens": 3}, ("small",), (Drafting("small", 4, 3),)),
        ({}, (), (NONE, NGRAM, SELF)),
        ({"method": ["none", "int8"]}, ("small",), (NONE, Drafting("int8", 16, 15))),
        ({}, ("small",), (NONE, NGRAM, SELF, Drafting("small", 16, 15))),
    ],
)
def test_allowed_drafts_are_those_of_the_method(config, more, expected):
    assert allowed_drafts(EngineConfig(**config), Schedule(), more) == expected


def test_aligned_windows_keep_the_length_of_the_schedule():
    aligned = Schedule(Numerics(alignment="window"), Budget(64, 8))
    assert allowed_drafts(EngineConfig(), aligned) == (Drafting("self", 8, 7), Drafting("ngram", 8, 7))
    assert allowed_drafts(EngineConfig(method="none"), aligned) == (Drafting("none", 8),)
    assert allowed_drafts(EngineConfig(method=("int8", "ngram")), aligned) == (Drafting("int8", 8, 7), Drafting("ngram", 8, 7))
    assert allowed_drafts(EngineConfig(), aligned.with_budget(64, 1)) == (NONE,)


@pytest.mark.parametrize("max_requests", range(1, 70))
def test_buckets_hold_every_number_of_rows_and_are_well_apart(max_requests):
    sizes = buckets(max_requests)
    assert sizes[0] == 1
    assert sizes[-1] == max_requests
    assert all(larger >= 2 * smaller for smaller, larger in itertools.pairwise(sizes))
    assert all(larger < 4 * smaller for smaller, larger in itertools.pairwise(sizes[1:]))


@pytest.mark.parametrize(
    ("max_requests", "expected"), [(1, (1,)), (2, (1, 2)), (5, (1, 5)), (8, (1, 4, 8)), (32, (1, 4, 8, 16, 32))]
)
def test_buckets_of_small_cases(max_requests, expected):
    assert buckets(max_requests) == expected


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)])
def test_pow2_ceil(n, expected):
    assert pow2_ceil(n) == expected


@pytest.mark.parametrize(
    ("batch", "window", "rows", "expected"),
    [
        (5, 1, 64, [5, 8, 64]),
        (8, 1, 64, [8, 64]),
        (64, 1, 64, [64]),
        (100, 1, 64, [64]),  # two passes a step
        (3, 4, 64, [12, 16, 64]),
        (5, 16, 64, [64]),
        (1, 16, 8, [16]),  # a window alone is more than the anchor
    ],
)
def test_canonical_plans_go_from_the_batch_alone_to_the_anchor(batch, window, rows, expected):
    plans = canonical_plans(batch, rows, Drafting("self", window, window - 1))
    assert [plan.budget.rows for plan in plans] == expected
    assert all(plan.batch == batch and plan.budget.window == window and not plan.ordinary for plan in plans)


@pytest.mark.parametrize(
    ("num_requests", "deterministic", "changes", "expected"),
    [
        (0, True, {}, ""),
        (9, False, {}, "ordinary[1] ordinary[4] ordinary[8]"),
        (8, False, {}, "ordinary[8]"),
        (2, True, {"method": "none"}, "ordinary[4] 4x1[4] 64x1[4]"),
        (3, True, {"method": "self"}, "ordinary[4] 4x16 self[4]"),
        (1, True, {}, "ordinary[1] 1x1[1] 64x1[1] 1x4 ngram[1] 16x4 ngram[1] 1x16 self[1] 4x16 self[1]"),
        (9, True, {"method": "none", "max_requests": 2}, "ordinary[1] 1x1[1] 64x1[1] ordinary[2] 2x1[2] 64x1[2]"),
    ],
)
def test_needed_plans_of_small_cases(num_requests, deterministic, changes, expected):
    config = EngineConfig(**{"max_requests": 8, **changes})
    plans = needed_plans(config, Schedule(budget=Budget(rows=64)), num_requests, Needs(deterministic, processing=False))
    assert " ".join(plan.label for plan in plans) == expected


def test_needed_plans_of_aligned_windows_keep_the_schedules_window():
    schedule = Schedule(Numerics(alignment="window"), Budget(64, 32))
    plans = needed_plans(EngineConfig(max_requests=1), schedule, 1, Needs(processing=False))
    assert [plan.label for plan in plans] == ["ordinary[1]", "1x32 self[1]", "2x32 self[1]", "1x32 ngram[1]", "2x32 ngram[1]"]


# Segments -------------------------------------------------------------------------------------------------------------------


def segment_of(plan: Plan, *, behind: tuple[int, ...] = (), ready: int = 8, waiting: bool = True, **changes) -> Segment:
    """A segment of 8 rows, all deterministic; a step takes 4 ms and a look of the host 1."""
    load = Load(ready + len(behind), 0, behind, ready_deterministic=ready, num_ready=ready, waiting=waiting, processing=False)
    measured = {"segment_steps": 64, "max_prefill_passes": 1, "prefill": Budget(64, 16)}
    costs = Costs(step_s=0.004, visit_s=changes.pop("visit_s", 0.001), smaller_batch=4)
    return plan_segment(load, plan, costs, **{**measured, **changes})


def test_segment_with_nobody_behind_is_steps_alone():
    assert segment_of(plan_of(8, 1)) == Segment(rounds=0, prefill_passes=0, steps=64, max_idle=2, min_live=1)
    assert segment_of(plan_of(8, 16)).steps == 4  # 64 tokens in windows of 16


@pytest.mark.parametrize(
    ("step_ms", "tokens"), [(4, 64), (0.8, 64), (0.2, 250), (0.01, 512), (0, 64), (math.inf, 64)], ids=lambda value: str(value)
)
def test_segments_are_longer_where_steps_are_short(step_ms, tokens):
    """Looks of 1 ms take 2 % of 50 ms."""
    assert segment_length(Costs(step_s=step_ms / 1000, visit_s=0.001, smaller_batch=0)) == tokens


def test_segments_of_steps_that_commit_several_tokens_are_as_many_steps():
    costs = Costs(step_s=0.002, visit_s=0.001, smaller_batch=0)
    assert segment_length(costs, 8) == 25 * 8  # 50 ms in steps of 2


def test_segment_of_steps_that_may_commit_one_token_or_many_is_ended_by_what_they_gain():
    """The device counts: after 48 tokens of a sequence there is room for one step of 16 within 64."""
    lookup = canonical_plans(8, 64, NGRAM)[0]
    segment = segment_of(lookup)
    assert (segment.steps, segment.max_gain, segment.most_gain(16)) == (64, 48, 64)
    streamed = segment_of(lookup, segment_steps=1)
    assert (streamed.steps, streamed.max_gain, streamed.most_gain(16)) == (1, 0, 16)
    prompts = segment_of(lookup, behind=(10_000,), ready=6)
    assert prompts.most_gain(16) == MAX_ROUNDS * 16


def test_segment_of_prompts_alone_prefills_all_of_them_first():
    """100 and 30 tokens: 7 and 2 windows of 16, three passes of 4 windows; no request waits for them."""
    segment = segment_of(ordinary_plan(8), behind=(100, 30), ready=0)
    assert (segment.rounds, segment.prefill_passes, segment.num_steps) == (1, 3, 64)


def test_segment_of_prompts_that_passes_answer_begins_with_them_and_has_a_step_less():
    """64 tokens that the cache lacks and the last one are 5 windows, two passes; without answers they are one pass."""
    plan = plan_of(8, 1)
    answered = segment_of(plan, behind=(64,), ready=0, answers=True)
    assert (answered.rounds, answered.prefill_passes, answered.num_prefill_passes, answered.steps) == (0, 2, 2, 63)
    assert answered.most_gain(1) == 64
    others = segment_of(plan, behind=(64,), ready=0)
    assert (others.rounds, others.num_prefill_passes, others.most_gain(1)) == (1, 1, 64)
    beside = segment_of(plan, behind=(64,), ready=7, answers=True)
    assert (beside.rounds, beside.num_steps, beside.most_gain(1)) == (2, 64, 65)  # what was read gains one more
    assert not segment_of(plan, answers=True).answers  # nothing is read
    assert segment_of(plan, behind=(64,), ready=0, answers=True, segment_steps=1).steps == 0  # a stream's first token


def test_segment_with_prompts_beside_decoding_rows_takes_turns():
    """No decoding request waits for more than one pass: three times a pass and a step, then all decode."""
    segment = segment_of(plan_of(8, 1), behind=(100, 30), ready=6)
    assert (segment.rounds, segment.prefill_passes, segment.steps, segment.num_steps) == (3, 1, 61, 64)
    unfinished = segment_of(plan_of(8, 1), behind=(10_000,), ready=6)
    assert (unfinished.rounds, unfinished.steps) == (MAX_ROUNDS, 0)
    patient = segment_of(plan_of(8, 1), behind=(100, 30), ready=6, max_prefill_passes=2)
    assert (patient.rounds, patient.prefill_passes) == (2, 2)


def test_segment_whose_own_windows_are_enough_for_the_prompts_needs_no_pass_for_them():
    """Two of four windows of 16 verify: 32 tokens ride along, 33 do not."""
    plan = Plan(8, Budget(64, 16), "self", 15)
    assert empty_windows(plan, Load(2, 0, (32,), ready_deterministic=2, num_ready=2, waiting=True, processing=False)) == 2
    assert segment_of(plan, behind=(32,), ready=2).prefill_passes == 0
    assert segment_of(plan, behind=(33,), ready=2).prefill_passes == 1
    assert segment_of(ordinary_plan(8), behind=(1,), ready=2).prefill_passes == 1  # ordinary steps have no canonical pass


def test_batches_worth_making_took_part_in_a_sixteenth_of_the_passes():
    assert worth_making({32: 4000, 8: 280, 1: 320}) == (1, 32)
    assert worth_making({4: 10}) == (4,)


def test_segment_of_one_row_each_takes_along_one_token_of_each():
    plan = plan_of(8, 1)
    assert plan.reads_one_each
    assert not ordinary_plan(8).reads_one_each
    assert segment_of(plan, behind=(1, 1), ready=6).prefill_passes == 0
    assert segment_of(plan, behind=(2,), ready=6).prefill_passes == 1
    assert segment_of(plan, behind=(), ready=8).prefill_passes == 0


def test_segment_ends_when_idling_has_cost_as_much_as_looking():
    """A look costs 8 rows 1 ms, an idle row a step's 4 ms: after two idle row-steps both are even. With 3 ms a look, six."""
    assert segment_of(plan_of(8, 1)).max_idle == 2
    assert segment_of(plan_of(8, 1), visit_s=0.003).max_idle == 6
    assert segment_of(plan_of(8, 1), visit_s=0.0).max_idle == 1


def test_segment_with_nobody_waiting_ends_where_a_smaller_batch_will_do():
    segment = segment_of(plan_of(8, 1), waiting=False)
    assert (segment.min_live, segment.max_idle) == (5, NEVER)


@pytest.mark.parametrize(("num_steps", "rounds", "steps"), [(100, 3, 61), (10, 3, 7), (3, 3, 0), (2, 2, 0), (1, 1, 0)])
def test_shortened_segment_has_fewer_steps_and_then_fewer_rounds(num_steps, rounds, steps):
    segment = segment_of(plan_of(8, 1), behind=(100, 30), ready=6).shortened(num_steps)
    assert (segment.rounds, segment.steps) == (rounds, steps)
    assert segment_of(plan_of(8, 1)).shortened(num_steps).steps == min(64, num_steps)
