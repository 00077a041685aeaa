"""Decides what runs next, and for how long: pure functions of the load and of facts about plans.

Some facts are measured while plans run: what a step takes, how many drafts agree, how long the device waits for the host.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from detspec.draft.source import Drafter
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Plan
from detspec.generation.loop import NEVER
from detspec.schedule import Budget

WEIGHT = 0.5  # weight of a segment when a pace is followed
MOST_GROWTH = 2.0  # a process that was held up once says little about the pace
FEW_STEPS = 8  # a segment of fewer counts for less, in streams one of a single step for an eighth
COMPARISONS = 7  # the latest that count, or more of few steps
FIRST_RUNS = 3  # segments of each plan that show what it is worth
TRIALS = 0.005  # share of the time that trials of plans that seem slower may cost
PRIOR_WINDOWS = 4  # verified windows that the assumed acceptance counts as
REMEMBERED_WINDOWS = 192  # older windows count less and less: texts change
RECALLED_WINDOWS = 16  # all windows from before another plan ran count as at most so many
MAX_ROUNDS = 8
SEGMENT_STEPS = 64
MOST_SEGMENT_STEPS = 512
LOOKING = 0.02  # share of the time that looks of the host should take at most

Observe = Callable[[Plan, float, int], None]  # is told the seconds of each of a number of steps of a plan, 0 if not known


class StepTimes:
    """Seconds of one step of each plan with its batch full, comparable among plans that may run in place of each other.

    Other work on the machine and long texts slow down all of them alike, now more and now less. What tells them apart is what
    they take next to each other: side by side when they are timed, and later whenever one follows on another. Of the latest of
    these comparisons the median counts. What a plan takes that runs on says what all of them take by now.
    """

    def __init__(self) -> None:
        self._compared: dict[Plan, deque[_Step]] = {}  # at a pace of 1, of segments that followed on another plan's
        self._seconds: dict[Plan, float] = {}  # the median of these
        self._pace: dict[Hashable, float] = {}  # of plans of one size, times as slow as when they were timed
        self._waited_s: dict[Plan, float] = {}
        self._runs: dict[Plan, int] = {}
        self._latest: dict[Hashable, Plan] = {}  # the plan of each size that ran last

    def measured(self, seconds: Mapping[Plan, float]) -> None:
        """Takes over what plans took side by side."""
        for plan, step_s in seconds.items():
            self._compared.pop(plan, None)
            self._compare(plan, _Step(step_s, max(1, SEGMENT_STEPS // plan.most_tokens)))
            self._pace[size(plan)] = 1.0
            self._waited_s[plan] = 0.0
            self._runs[plan] = 0
            self._latest.pop(size(plan), None)

    def started(self, plan: Plan) -> None:
        """`plan` runs next."""
        self._waited_s[plan] = 0.0
        self._runs[plan] = self.runs(plan) + 1

    def observed(self, plan: Plan, seconds: float, num_steps: int) -> None:
        """Takes what each of `num_steps` took, 0 if that is not known."""
        if seconds:
            self._follow(plan, seconds, num_steps)
        for other in self._compared:
            if size(other) == size(plan) and other != plan:
                self._waited_s[other] = self.waited_s(other) + (seconds or self.known(plan)) * num_steps

    def _follow(self, plan: Plan, seconds: float, num_steps: int) -> None:
        """Compares `plan` with the one that ran before it, if that is another, and follows the pace of both."""
        pace = self._pace.setdefault(size(plan), 1.0)
        if self._latest.get(size(plan), plan) != plan or plan not in self._compared:
            self._compare(plan, _Step(seconds / pace, num_steps))
        self._latest[size(plan)] = plan
        now = min(seconds / self._seconds[plan], MOST_GROWTH * pace)
        self._pace[size(plan)] = pace + WEIGHT * min(1.0, num_steps / FEW_STEPS) * (now - pace)

    def _compare(self, plan: Plan, step: "_Step") -> None:
        """Adds a comparison, and forgets old ones; single steps count together, a segment's worth of them."""
        compared = self._compared.setdefault(plan, deque())
        compared.append(step)
        num_steps = sum(each.num_steps for each in compared)
        while len(compared) > COMPARISONS and num_steps - compared[0].num_steps >= SEGMENT_STEPS:
            num_steps -= compared.popleft().num_steps
        self._seconds[plan] = _median(compared)

    def known(self, plan: Plan) -> float:
        """The estimate for `plan`; inf if it neither was timed nor ran yet."""
        return self._pace[size(plan)] * self._seconds[plan] if plan in self._seconds else math.inf

    def waited_s(self, plan: Plan) -> float:
        """Seconds that others ran in place of `plan` since it ran last."""
        return self._waited_s.get(plan, 0.0)

    def runs(self, plan: Plan) -> int:
        """How often `plan` was started."""
        return self._runs.get(plan, 0)


class _Step(NamedTuple):
    """Seconds of each of so many steps."""

    seconds: float
    num_steps: int


def _median(steps: Collection[_Step]) -> float:
    """The seconds that half of all `steps` do not exceed."""
    half = sum(each.num_steps for each in steps) / 2
    reached = 0
    for each in sorted(steps):
        reached += each.num_steps
        if reached >= half:
            break
    return each.seconds


class Acceptance:
    """Drafted tokens that one verified window of each draft source brings, from what was verified lately."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._counts: dict[Hashable, tuple[float, float]] = {}  # windows, accepted tokens; older ones count less
        self._latest: Hashable = None  # how the segment before this one drafted

    def executes(self, plan: Plan) -> bool:
        """Whether drafting runs the model, so that ordinary sequences take the draft as it is."""
        return self._drafters[plan.draft].source.executes

    def observed(self, plan: Plan, windows: int, accepted: int) -> None:
        """Counts `windows` more that `plan` verified, and the drafted tokens that were accepted in them."""
        if plan.num_drafts and windows:
            before = self._counts.get(_drafting(plan), (0.0, 0.0))
            keep = max(0.0, 1 - windows / REMEMBERED_WINDOWS)
            if self._latest != _drafting(plan):
                keep = min(keep, RECALLED_WINDOWS / max(1.0, before[0]))
            self._counts[_drafting(plan)] = keep * before[0] + windows, keep * before[1] + accepted
        self._latest = _drafting(plan)

    def tokens(self, plan: Plan) -> float:
        """Tokens that a window of `plan` is expected to commit: the accepted ones and one more.

        Until windows were verified that is what the source assumes: with a chance `a` that a drafted token agrees, `D` drafted
        tokens commit `1 + a + a^2 + ... + a^D`.
        """
        chance = self._drafters[plan.draft].source.prior_acceptance
        assumed = sum(chance**i for i in range(1, plan.most_tokens))
        windows, accepted = self._counts.get(_drafting(plan), (0.0, 0.0))
        return 1 + (PRIOR_WINDOWS * assumed + accepted) / (PRIOR_WINDOWS + windows)


def _drafting(plan: Plan) -> Hashable:
    """Key by which acceptance is counted: the source, and the most tokens and rows that a sequence gets."""
    return plan.draft, plan.num_drafts, plan.budget.rows // plan.batch


class BusyClock:
    """Told when the device gets work and when it has none, within a run.

    Attributes:
        busy_s, idle_s: seconds with and without work.
        visit_s: seconds without work each time that the host looks, a running mean.
    """

    def __init__(self) -> None:
        self.busy_s = self.idle_s = 0.0
        self.visit_s = 1e-3  # until measured
        self._busy = False
        self._since: float | None = None
        self._lap = 0.0

    def work(self) -> None:
        """The device has work."""
        if self._busy:
            return
        now = time.perf_counter()
        waited = 0.0 if self._since is None else now - self._since
        if waited > 0:  # a clock that was set back says nothing
            self.idle_s += waited
            self.visit_s += 0.1 * (min(waited, 2 * self.visit_s) - self.visit_s)  # a compilation is no visit
        self._since = now
        self._busy = True
        self._lap = now

    def lap(self) -> float:
        """Seconds of work since the last lap, or since the device got something."""
        now = time.perf_counter()
        seconds = now - self._lap
        self._lap = now
        return seconds

    def free(self) -> None:
        """The device has nothing to do."""
        if self._busy and self._since is not None:
            now = time.perf_counter()
            self.busy_s += now - self._since
            self._since = now
            self._busy = False

    def stop(self) -> None:
        """Stops: time until the next work is not counted."""
        self.free()
        self._since = None


@dataclasses.dataclass(frozen=True)
class Load:
    """Counts of what is in flight when a segment is planned."""

    num_deterministic: int  # deterministic sequences
    num_ordinary: int  # ordinary sequences
    behind: tuple[int, ...]  # for each sequence that is catching up, the tokens that it lacks in the cache
    ready_deterministic: int  # deterministic sequences that can go on decoding at once
    num_ready: int  # all sequences that can; the rest are `behind`
    waiting: bool  # more requests wait for a place
    processing: bool  # some sequences ask for logits processing
    unread_chunks: int = 0  # chunks of prompts that a rider has yet to read, in passes of their own: the most it can take
    is_streamed: bool = False  # updates of some sequences are wanted with each step
    stops: bool = False  # the host looks for stop strings
    left: int = NEVER  # the most tokens that a sequence may yet gain


class Facts(NamedTuple):
    """Facts about plans when the next one is chosen."""

    certified: Sequence[Plan]  # deterministic sequences may use them
    ordinary: Sequence[Plan]  # ordinary ones alone
    times: StepTimes
    acceptance: Acceptance
    visit_s: float  # seconds that the device idles when the host looks
    answers: bool = False  # passes over prompts can commit the token after each, if no sequence asks for logits processing


@dataclasses.dataclass(frozen=True)
class Segment:
    """Work before the host looks again: `rounds` times `prefill_passes` and a step of the plan, then `steps` at most.

    Without rounds the passes come first, once: they read all prompts, and answer.
    """

    rounds: int
    prefill_passes: int
    steps: int
    max_idle: int  # it ends early once ended sequences have idled for so many steps in total
    min_live: int  # it ends early once fewer sequences than this are live
    max_gain: int = NEVER  # steps end early once a sequence has gained more tokens than this
    answers: bool = False  # passes over prompts commit the token after each

    def most_gain(self, most_tokens: int) -> int:
        """Most tokens that a sequence gains, if a step commits up to `most_tokens`."""
        of_steps = min(self.num_steps * most_tokens, self.rounds * most_tokens + self.max_gain + most_tokens)
        return self.answers + of_steps

    @property
    def num_prefill_passes(self) -> int:
        """Most passes over prompts in all."""
        return max(self.rounds, 1) * self.prefill_passes

    @property
    def num_steps(self) -> int:
        """Most steps of all rounds together."""
        return self.rounds + self.steps

    def shortened(self, num_steps: int) -> "Segment":
        """This segment with at most `num_steps` steps, at least 1."""
        rounds = min(self.rounds, num_steps)
        return dataclasses.replace(self, rounds=rounds, steps=min(self.steps, num_steps - rounds))


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs that planning a segment weighs against each other."""

    step_s: float  # seconds of one step with the batch full
    visit_s: float  # seconds that the device idles when the host looks
    smaller_batch: int  # sequences that the next cheaper batch holds, 0 if there is none


class Decision(NamedTuple):
    """A plan that runs next, and for how long."""

    plan: Plan
    segment: Segment


def decide(load: Load, facts: Facts, config: EngineConfig, prefill: Budget) -> Decision | None:
    """The plan and the segment that run next; `prefill` is the budget of a pass over prompts.

    None if a deterministic sequence is live, and no certified plan is large enough.
    """
    plan = choose_plan(load, facts, config.segment_steps)
    if plan is None:
        return None
    costs = Costs(facts.times.known(plan), facts.visit_s, smaller_batch(plan, facts))
    segment = plan_segment(
        load,
        plan,
        costs,
        segment_steps=most_gain(load, plan, costs, facts.acceptance, config.segment_steps),
        max_prefill_passes=config.max_prefill_passes,
        prefill=prefill,
        answers=facts.answers and not load.processing,
    )
    return Decision(plan, segment)


def choose_plan(load: Load, facts: Facts, asked: int | None = None) -> Plan | None:
    """Chooses the smallest batch that fits, filled the way that commits most tokens per second; None if no plan fits.

    Ordinary requests alone take an ordinary plan, or a canonical one while theirs is coming.

    A plan that seems slower is tried for a segment, whenever that costs no more than `TRIALS` of the time since it ran last.
    `asked` are the most tokens of a segment, if that is given.
    """
    if load.num_deterministic == 0 and (ordinary := fitting(load, facts.ordinary)):
        return min(ordinary, key=size)
    found = fitting(load, facts.certified)
    if not found:
        return None
    smallest = min(map(size, found))
    plans = [plan for plan in found if size(plan) == smallest]
    if len(plans) == 1:
        return plans[0]
    times = facts.times
    seldom = min(plans, key=times.runs)
    if times.runs(seldom) < FIRST_RUNS:  # at first they take turns; then estimates decide
        return seldom
    tokens = {plan: step_tokens(load, plan, facts.acceptance) for plan in plans}
    best = choose({plan: times.known(plan) for plan in plans}, tokens)
    token_s = {plan: times.known(plan) / tokens[plan] for plan in plans}
    for plan in sorted(plans, key=times.waited_s, reverse=True):
        costs = Costs(times.known(plan), facts.visit_s, smaller_batch=0)
        gain = min(load.left, most_gain(load, plan, costs, facts.acceptance, asked))  # of each sequence in a trial
        num_tokens = gain * (load.num_deterministic + load.num_ordinary)
        if plan != best and num_tokens * (token_s[plan] - token_s[best]) <= TRIALS * times.waited_s(plan):
            return plan
    return best


def fitting(load: Load, plans: Sequence[Plan]) -> list[Plan]:
    """Selects the `plans` that hold what is live and have what it needs."""
    num_live = load.num_deterministic + load.num_ordinary
    return [plan for plan in plans if plan.batch >= num_live and plan.processing >= load.processing]


def size(plan: Plan) -> tuple[int, bool]:
    """A plan is larger than another by its batch, then by logits processing."""
    return plan.batch, plan.processing


def choose(plans: Mapping[Plan, float], tokens: Mapping[Plan, float]) -> Plan:
    """The plan with the most expected tokens per second.

    `plans`, not empty, has the seconds that a step of each candidate takes with its batch full, `tokens` those it should
    commit.
    """
    return max(plans, key=lambda plan: tokens[plan] / plans[plan])


def step_tokens(load: Load, plan: Plan, acceptance: Acceptance) -> float:
    """Tokens that one step is expected to commit: ordinary sequences take an executing draft as it is."""
    if not plan.num_drafts:
        return load.num_deterministic + load.num_ordinary
    verified = acceptance.tokens(plan)
    as_it_is = plan.num_drafts if acceptance.executes(plan) else verified
    return load.num_deterministic * verified + load.num_ordinary * as_it_is


def smaller_batch(plan: Plan, facts: Facts) -> int:
    """The next smaller batch that the live sequences of `plan` could move to; 0 if there is none."""
    others = facts.ordinary if plan.ordinary else facts.certified
    return max((other.batch for other in others if other.batch < plan.batch and other.processing >= plan.processing), default=0)


def most_gain(load: Load, plan: Plan, costs: Costs, acceptance: Acceptance, asked: int | None) -> int:
    """Most tokens that a sequence gains in the next segment, `asked` if that is given; the host also looks for stop strings."""
    if load.is_streamed:
        return 1
    if asked is not None:
        return asked
    if load.stops:
        return SEGMENT_STEPS
    # Where steps may skip their drafts the device counts what they commit; others count as if all were accepted.
    return segment_length(costs, acceptance.tokens(plan) if plan.skips else plan.most_tokens)


def segment_length(costs: Costs, step_tokens: float = 1) -> int:
    """Most tokens that a sequence gains before the host looks: more than `SEGMENT_STEPS` where steps are short.

    A look takes 1 ms, a step 4: 64 tokens take 256 ms. A step takes 0.2: 64 would take 12.8 ms, so it is 250 steps in 50 ms.
    `step_tokens` is how many tokens a step counts for.
    """
    if not 0 < costs.step_s < math.inf:
        return SEGMENT_STEPS
    return min(max(SEGMENT_STEPS, math.ceil(step_tokens * costs.visit_s / (LOOKING * costs.step_s))), MOST_SEGMENT_STEPS)


def num_windows(behind: Sequence[int], window: int) -> int:
    """Windows of `window` that spans of so many tokens are cut into."""
    return sum(-(-tokens // window) for tokens in behind)


def plan_segment(
    load: Load, plan: Plan, costs: Costs, *, segment_steps: int, max_prefill_passes: int, prefill: Budget, answers: bool = False
) -> Segment:
    """Decides how long to run `plan`, and how prompts that are being read get their share of the passes.

    While some sequences decode, none of them waits for more than `max_prefill_passes` passes over prompts. These passes and
    steps take turns until all sequences decode. Spans that fit into windows which the step's own pass leaves empty need
    no pass of their own.

    A sequence that has ended idles until the host looks, and a look costs all sequences `visit_s`. So the host looks when
    idling has cost as much as looking will, which is at most twice the cost of the best moment.

    `segment_steps` are the most tokens that a sequence may gain before the host looks, `prefill` is the budget of a pass over
    prompts, and `answers` says whether such passes commit the token after each prompt.
    """
    # How many tokens a step that may skip its drafts commits is not known, so the device counts.
    steps = segment_steps if plan.skips else max(1, segment_steps // plan.most_tokens)
    max_gain = max(0, segment_steps - plan.most_tokens) if plan.skips else NEVER
    segment_of = partial(Segment, max_gain=max_gain, answers=answers)
    max_idle = NEVER
    min_live = costs.smaller_batch + 1
    if load.waiting:
        max_idle = max(1, round(costs.visit_s * plan.batch / max(costs.step_s, 1e-9)))
        min_live = 1
    read = [tokens + answers for tokens in load.behind]  # those that answer read the last token, too
    passes = -(-num_windows(read, prefill.window) * prefill.window // prefill.rows) + load.unread_chunks
    if load.num_ready == 0:  # each step commits a token of each, and so do passes that answer
        return segment_of(0 if answers else 1, passes, min(steps, load.left) - 1, max_idle, min_live)
    if not load.unread_chunks and rides_along(plan, load):
        return segment_of(0, 0, steps, max_idle, min_live, answers=False)
    at_once = min(passes, max_prefill_passes)
    rounds = -(-passes // at_once)
    if rounds > MAX_ROUNDS:
        return segment_of(MAX_ROUNDS, at_once, 0, max_idle, min_live)
    return segment_of(rounds, at_once, max(0, steps - rounds), max_idle, min_live)


def rides_along(plan: Plan, load: Load) -> bool:
    """Whether what sequences lack fits into the first step's own passes."""
    if plan.reads_one_each:
        return max(load.behind, default=0) <= 1
    return num_windows(load.behind, plan.budget.window) <= empty_windows(plan, load)


def empty_windows(plan: Plan, load: Load) -> int:
    """Windows of a step's last pass that verify nothing, for sure."""
    if plan.ordinary or plan.skips:
        return 0
    verified = load.num_ready if plan.draft == "none" else load.ready_deterministic
    return -verified % plan.budget.groups
