"""What runs next: the plan, for how many steps, and the pages that these need."""

from detspec.engine.agreement import Agreement
from detspec.engine.device import Device
from detspec.engine.planner import Planner
from detspec.engine.policy import SEGMENT_STEPS, Costs, Plan, Segment, plan_segment, segment_length
from detspec.engine.scheduler import Scheduler

TRIED_STEPS = 4  # of a plan that has not run for long, to see what it takes by now


def next_segment(scheduler: Scheduler, planner: Planner, device: Device, agreement: Agreement) -> tuple[Plan, Segment] | None:
    """The plan and the segment that run next, with pages reserved; None if pages do not last for one step of all sequences.

    Raises `InputError` if a deterministic sequence is among them, and the device certifies no plan that is large enough.
    """
    load = scheduler.load()
    plan, is_trial = planner.choose(load)
    costs = Costs(
        step_s=planner.step_times.known(plan),
        visit_s=agreement.visit_s(device.clock.visit_s),
        smaller_batch=planner.smaller_batch(plan),
    )
    segment_steps = most_steps(scheduler, planner, plan, costs, device.config.segment_steps)
    segment = plan_segment(
        load,
        plan,
        costs,
        segment_steps=min(segment_steps, TRIED_STEPS * plan.most_tokens) if is_trial else segment_steps,
        max_prefill_passes=device.config.max_prefill_passes,
        prefill=device.schedule.budget,
    )
    gain = segment.most_gain(plan.most_tokens)
    if scheduler.affords(gain):
        scheduler.reserve(gain)
        planner.starts(segment.num_steps)
        return plan, segment
    num_steps = scheduler.affordable(segment.num_steps // 2, plan.most_tokens)
    if not num_steps:
        return None
    scheduler.reserve(num_steps * plan.most_tokens)
    planner.starts(num_steps)
    return plan, segment.shortened(num_steps)


def most_steps(scheduler: Scheduler, planner: Planner, plan: Plan, costs: Costs, asked: int | None) -> int:
    """Most tokens that a sequence gains in the next segment, `asked` if that is given; the host also looks for stop strings."""
    sequences = scheduler.sequences
    if any(sequence.streamed for sequence in sequences):
        return 1
    if asked is not None:
        return asked
    if any(sequence.request.sampling.stop for sequence in sequences):
        return SEGMENT_STEPS
    # Where steps may skip their guesses the device counts what they commit; others count as if all were accepted.
    return segment_length(costs, planner.acceptance.tokens(plan) if plan.skips else plan.most_tokens)
