"""How passes spend their rows, and how long the device runs on its own: pure functions of the load and of measured times."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from detspec.engine.engine_config import EngineConfig
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule

NEVER = 2**30
WORTH_MAKING = 1 / 16  # of the passes
LARGE_ROWS = 512  # more token rows a pass make larger products


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step's program: `batch` sequences, canonical passes of `budget`, up to `num_drafts` tokens of the source `draft`.

    Without drafts it is plain canonical decoding of all sequences, ordinary ones too. `ordinary` decodes without verification.
    With `skips` a pass reads one row of each sequence when its guesses are worth no more. Without `processing` it can sample,
    but not process logits first: it is smaller, and for requests that ask for no more.
    """

    batch: int
    budget: Budget
    draft: str = "none"
    num_drafts: int = 0
    ordinary: bool = False
    processing: bool = False
    skips: bool = False

    @property
    def narrow(self) -> Budget | None:
        """The budget of passes that read no guesses, if it `skips`."""
        return Budget(self.batch, 1) if self.skips else None

    @property
    def reads_one_each(self) -> bool:
        """Whether its passes hold one row of each sequence, at its own place."""
        return not self.ordinary and not self.num_drafts and self.budget == Budget(self.batch, 1)

    @property
    def most_tokens(self) -> int:
        """Most tokens that one step commits for a sequence."""
        return self.num_drafts + 1

    @property
    def label(self) -> str:
        """Short name for tables: "ordinary[8]", "8x1[8]", "4x16 self[8]", "8x1 processing[8]"."""
        kind = "ordinary" if self.ordinary else f"{self.budget.groups}x{self.budget.window}"
        draft = "" if self.draft == "none" else f" {self.draft}"
        return f"{kind}{draft}{' processing' if self.processing else ''}[{self.batch}]"


class Needs(NamedTuple):
    """What requests need of programs, all of them together; by default anything."""

    deterministic: bool = True  # some requests are deterministic
    ordinary: bool = True  # some requests are ordinary
    processing: bool = True  # some requests ask for more than a temperature

    @classmethod
    def of(cls, sampling: Iterable[SamplingParams]) -> "Needs":
        """What requests with these parameters need."""
        deterministic = ordinary = processing = False
        for params in sampling:
            deterministic |= params.deterministic
            ordinary |= not params.deterministic
            processing |= params.needs_processing
        return cls(deterministic, ordinary, processing)

    def __or__(self, other: "Needs") -> "Needs":
        """What both need together."""
        return Needs(*(one or another for one, another in zip(self, other, strict=True)))


def pow2_ceil(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def buckets(max_requests: int) -> tuple[int, ...]:
    """Batch sizes that programs are compiled for: 1, 4, 8, 16 and so on up to half of `max_requests`, and `max_requests`."""
    sizes = [1] if max_requests > 1 else []
    size = 4
    while 2 * size <= max_requests:
        sizes.append(size)
        size *= 2
    return (*sizes, max_requests)


def ordinary_plan(batch: int, processing: bool = False) -> Plan:
    """Ordinary decoding, one token a step."""
    return Plan(batch, Budget(batch, 1), ordinary=True, processing=processing)


class Drafting(NamedTuple):
    """How the rows of canonical passes are used: windows of `window`, for up to `num_drafts` tokens of the source `draft`."""

    draft: str = "none"
    window: int = 1
    num_drafts: int = 0
    skips: bool = False  # see `Plan`


NO_DRAFTS = Drafting()


def canonical_plans(batch: int, rows: int, drafting: Drafting = NO_DRAFTS, *, processing: bool = False) -> tuple[Plan, ...]:
    """Plans of one way to draft in the order in which they are tried: the cheapest first, at last the anchor's `rows`.

    batch 5, windows of 1, rows 64:     5, 8, 64 rows        batch 5, windows of 16, rows 64:     64 rows
    """
    draft, window, num_drafts, skips = drafting
    anchor = max(rows, window)
    budgets = [*(min(anchor, count * window) for count in (batch, pow2_ceil(batch))), anchor]
    return tuple(
        Plan(batch, Budget(budget, window), draft, num_drafts, processing=processing, skips=skips and batch < budget)
        for budget in dict.fromkeys(budgets)
    )


def needed_batches(config: EngineConfig, num_requests: int) -> tuple[int, ...]:
    """Batches that `num_requests` at once need: none for none, and all if they are refilled."""
    sizes = buckets(config.max_requests)
    return sizes if num_requests > config.max_requests else tuple(size for size in sizes if size >= num_requests > 0)[:1]


def worth_making(passes: Mapping[int, int]) -> tuple[int, ...]:
    """Batches that took part in so many of `passes`, a number for each, that all their plans are worth compiling."""
    least = WORTH_MAKING * sum(passes.values())
    return tuple(sorted(batch for batch, number in passes.items() if number >= least))


def lookup_window(schedule: Schedule) -> int:
    """Rows of a window that verifies prompt lookup: few where rows cost arithmetic, a tile's where they are free."""
    return 4 if schedule.numerics.implementation in ("reference", "cpu") else 8


def allowed_drafts(config: EngineConfig, schedule: Schedule, more: Iterable[str] = ()) -> tuple[Drafting, ...]:
    """The ways to draft that the method allows; "auto" also tries the sources called `more`.

    A source that drafts for all sequences fills a window of each. Prompt lookup drafts for some, so its windows are short: the
    likeliest guesses get several. Aligned windows keep the schedule's length, because the bits depend on it.
    """
    auto = config.method == "auto"
    num_drafts = config.num_speculative_tokens
    if schedule.numerics.alignment == "window":
        window = schedule.budget.window
        names = ("self", "ngram", *more) if auto else config.methods
        ways = tuple(Drafting(name, window, 0 if name == "none" else window - 1) for name in names)
        return ways if window > 1 else (Drafting(),)
    names = ("none", "ngram", "self", *more) if auto else config.methods
    window = min(num_drafts + 1, lookup_window(schedule))
    special = {"none": Drafting(), "ngram": Drafting("ngram", window, num_drafts, skips=True)}
    return tuple(special.get(name, Drafting(name, num_drafts + 1, num_drafts)) for name in names)


def needed_plans(config: EngineConfig, schedule: Schedule, num_requests: int, needs: Needs) -> tuple[Plan, ...]:
    """The plans that an engine compiles at most for `num_requests`.

    It tries those of one batch and draft in this order until one is certified, and no drafts that cannot win.
    """
    plans: list[Plan] = []
    for batch in needed_batches(config, num_requests):
        plans.append(ordinary_plan(batch, needs.processing))
        for drafting in allowed_drafts(config, schedule) if needs.deterministic else ():
            plans += canonical_plans(batch, schedule.budget.rows, drafting, processing=needs.processing)
    return tuple(plans)


def large_passes(schedule: Schedule, max_len: int) -> Schedule:
    """The same schedule with passes of more rows and windows of a query tile at least; aligned windows keep their length."""
    window = schedule.budget.window
    if schedule.numerics.alignment == "free":
        window = max(window, schedule.numerics.query_tile)
    return schedule.with_budget(max(schedule.budget.rows, LARGE_ROWS, window), window) if window <= max_len else schedule


def choose(plans: Mapping[Plan, float], tokens: Mapping[Plan, float]) -> Plan:
    """The plan with the most expected tokens per second.

    `plans`, not empty, has the seconds that a step of each candidate takes with its batch full, `tokens` those it should
    commit.
    """
    return max(plans, key=lambda plan: tokens[plan] / plans[plan])


@dataclasses.dataclass(frozen=True)
class Load:
    """What is in flight when a segment is planned."""

    num_deterministic: int  # deterministic sequences
    num_ordinary: int  # ordinary sequences
    behind: tuple[int, ...]  # for each sequence that is catching up, the tokens that it lacks in the cache
    ready_deterministic: int  # deterministic sequences that can go on decoding at once
    num_ready: int  # all sequences that can; the rest are `behind`
    waiting: bool  # more requests wait for a place
    processing: bool  # some sequences ask for logits processing
    unread_chunks: int = 0  # chunks of prompts yet to be read with thoughts, in passes of their own: the most it can take


@dataclasses.dataclass(frozen=True)
class Segment:
    """What is run before the host looks again: `rounds` times `prefill_passes` and a step of the plan, then `steps` at most."""

    rounds: int
    prefill_passes: int
    steps: int
    max_idle: int  # it ends early once ended sequences have idled for so many steps in total
    min_live: int  # it ends early once fewer sequences than this are live
    max_gain: int = NEVER  # steps end early once a sequence has gained more tokens than this

    def most_gain(self, most_tokens: int) -> int:
        """Most tokens that a sequence gains, if a step commits up to `most_tokens`."""
        return min(self.num_steps * most_tokens, self.rounds * most_tokens + self.max_gain + most_tokens)

    @property
    def num_steps(self) -> int:
        """Most steps of all rounds together."""
        return self.rounds + self.steps

    def shortened(self, num_steps: int) -> "Segment":
        """The same with at most `num_steps` steps, at least 1."""
        rounds = min(self.rounds, num_steps)
        return dataclasses.replace(self, rounds=rounds, steps=min(self.steps, num_steps - rounds))


@dataclasses.dataclass(frozen=True)
class Costs:
    """What planning a segment weighs against each other."""

    step_s: float  # seconds of one step with the batch full
    visit_s: float  # seconds that the device idles when the host looks
    smaller_batch: int  # sequences that the next cheaper batch holds, 0 if there is none


MAX_ROUNDS = 8
SEGMENT_STEPS = 64
MOST_SEGMENT_STEPS = 512
LOOKING = 0.02  # share of the time that looks of the host should take at most


def segment_length(costs: Costs, step_tokens: float = 1) -> int:
    """Most tokens that a sequence gains before the host looks: more than `SEGMENT_STEPS` where steps are short.

    A look takes 1 ms, a step 4: 64 tokens take 256 ms. A step takes 0.2: 64 would take 12.8 ms, so it is 250 steps in 50 ms.
    `step_tokens` is how many tokens a step counts for.
    """
    if not 0 < costs.step_s < math.inf:
        return SEGMENT_STEPS
    return min(max(SEGMENT_STEPS, math.ceil(step_tokens * costs.visit_s / (LOOKING * costs.step_s))), MOST_SEGMENT_STEPS)


def num_windows(behind: Sequence[int], window: int) -> int:
    """Windows of `window` that stretches of so many tokens are cut into."""
    return sum(-(-tokens // window) for tokens in behind)


def plan_segment(
    load: Load, plan: Plan, costs: Costs, *, segment_steps: int, max_prefill_passes: int, prefill: Budget
) -> Segment:
    """How long to run `plan`, and how prompts that are being read get their share of the passes.

    While some sequences decode, none of them waits for more than `max_prefill_passes` passes over prompts. These passes and
    steps take turns until all sequences decode. Stretches that fit into windows which the step's own pass leaves empty need
    no pass of their own.

    A sequence that has ended idles until the host looks, and a look costs all sequences `visit_s`. So the host looks when
    idling has cost as much as looking will, which is at most twice the cost of the best moment.

    `segment_steps` are the most tokens that a sequence may gain before the host looks, `prefill` is the budget of a pass over
    prompts.
    """
    # How many tokens a step that may skip its guesses commits is not known, so the device counts.
    steps = segment_steps if plan.skips else max(1, segment_steps // plan.most_tokens)
    segment_of = partial(Segment, max_gain=max(0, segment_steps - plan.most_tokens) if plan.skips else NEVER)
    max_idle = NEVER
    min_live = costs.smaller_batch + 1
    if load.waiting:
        max_idle = max(1, round(costs.visit_s * plan.batch / max(costs.step_s, 1e-9)))
        min_live = 1
    passes = -(-num_windows(load.behind, prefill.window) * prefill.window // prefill.rows) + load.unread_chunks
    if load.num_ready == 0:
        return segment_of(1, passes, steps - 1, max_idle, min_live)
    if not load.unread_chunks and rides_along(plan, load):
        return segment_of(0, 0, steps, max_idle, min_live)
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
