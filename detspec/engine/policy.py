"""How passes spend their rows, and how long the device runs on its own: pure functions of the load and of measured times."""

import dataclasses
from collections.abc import Mapping, Sequence

from detspec.engine.engine_config import EngineConfig
from detspec.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step's program: `batch` rows of state, a canonical pass of `rows` in windows of `window`.

    `window` 1 is plain canonical decoding of every row, ordinary ones too. `fast` is ordinary decoding: nothing is verified.
    """

    batch: int
    rows: int
    window: int
    fast: bool = False

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"fast[{self.batch}]" if self.fast else f"{self.rows // self.window}x{self.window}[{self.batch}]"


def pow2_ceil(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def buckets(max_requests: int) -> tuple[int, ...]:
    """Batch sizes that programs are compiled for: powers of four up to half of `max_requests`, and `max_requests` itself."""
    sizes = [1] if max_requests > 1 else []
    while sizes and sizes[-1] * 8 <= max_requests:
        sizes.append(sizes[-1] * 4)
    return (*sizes, max_requests)


def fast_plan(batch: int) -> Plan:
    """Ordinary decoding, one token a step."""
    return Plan(batch=batch, rows=batch, window=1, fast=True)


def canonical_plans(batch: int, window: int, rows: int) -> tuple[Plan, ...]:
    """Plans of one window size in the order in which they are tried, the cheapest first and at last the anchor's `rows`.

        batch 5, window 1, rows 64:     5, 8, 64 rows        batch 5, window 16, rows 64:     64 rows

    `window` 1 is plain canonical decoding; larger ones are filled by the self draft.
    """
    anchor = max(rows, window)
    budgets = [*(min(anchor, count * window) for count in (batch, pow2_ceil(batch))), anchor]
    return tuple(Plan(batch=batch, rows=budget, window=window) for budget in dict.fromkeys(budgets))


def needed_batches(config: EngineConfig, num_requests: int) -> tuple[int, ...]:
    """Batches that a run of `num_requests` needs: none for none, and several only if rows refill."""
    sizes = buckets(config.max_requests)
    return sizes if num_requests > config.max_requests else tuple(size for size in sizes if size >= num_requests > 0)[:1]


def allowed_windows(config: EngineConfig, schedule: Schedule) -> tuple[int, ...]:
    """The window sizes that the method allows; aligned windows keep the schedule's, because the bits depend on it."""
    if schedule.numerics.alignment == "window":
        return (schedule.budget.window,)
    speculative = config.num_speculative_tokens + 1
    return {"none": (1,), "self": (speculative,)}.get(config.method, (1, speculative))


def needed_plans(config: EngineConfig, schedule: Schedule, num_requests: int, *, deterministic: bool) -> tuple[Plan, ...]:
    """The plans that an engine compiles at most for a run of `num_requests`; canonical ones if some are deterministic.

    It tries those of one batch and window in this order until one is certified, and no drafts that cannot win.
    """
    plans: list[Plan] = []
    for batch in needed_batches(config, num_requests):
        plans.append(fast_plan(batch))
        for window in allowed_windows(config, schedule) if deterministic else ():
            plans += canonical_plans(batch, window, schedule.budget.rows)
    return tuple(plans)


def step_tokens(plan: Plan, num_deterministic: int, num_ordinary: int, acceptance: float) -> float:
    """Tokens that one step is expected to commit.

    With a chance `a` that a guess agrees, a window of `W` commits `1 + a + a^2 + ... + a^(W-1)`.
    """
    if plan.fast or plan.window == 1:
        return num_deterministic + num_ordinary
    committed = sum(acceptance**i for i in range(plan.window))
    return num_deterministic * committed + num_ordinary * (plan.window - 1)


def choose(plans: Mapping[Plan, float], num_deterministic: int, num_ordinary: int, acceptance: float) -> Plan:
    """The plan with the most expected tokens per second.

    Args:
        plans: seconds that a step of each candidate takes with its batch full. Not empty.
        num_deterministic, num_ordinary: live rows of each kind, together at least 1.
        acceptance: chance that a drafted token agrees, 0 to 1.
    """
    return max(plans, key=lambda plan: step_tokens(plan, num_deterministic, num_ordinary, acceptance) / plans[plan])


@dataclasses.dataclass(frozen=True)
class Load:
    """What is in the rows when a segment is planned.

    Attributes:
        num_deterministic, num_ordinary: rows in use of each kind.
        behind: for each row that is catching up, the tokens that it lacks in the cache.
        ready_deterministic, num_ready: rows that can go on decoding at once; the rest are `behind`.
        waiting: more requests wait for a row.
        unread_chunks: chunks of prompts that are yet to be read thinking, in passes of their own: the most it can take.
    """

    num_deterministic: int
    num_ordinary: int
    behind: tuple[int, ...]
    ready_deterministic: int
    num_ready: int
    waiting: bool
    unread_chunks: int = 0


@dataclasses.dataclass(frozen=True)
class Segment:
    """What is run before the host looks again: `rounds` times `prefill_passes` and a step of the plan, then `steps` at most.

    Attributes:
        max_idle: it ends early once rows that ended on the way have idled for so many steps, added up.
        min_live: it ends early once fewer rows than this are live.
    """

    rounds: int
    prefill_passes: int
    steps: int
    max_idle: int
    min_live: int

    @property
    def num_steps(self) -> int:
        """Most steps of all rounds together."""
        return self.rounds + self.steps

    def shortened(self, num_steps: int) -> "Segment":
        """The same with at most `num_steps` steps, at least 1."""
        rounds = min(self.rounds, num_steps)
        return dataclasses.replace(self, rounds=rounds, steps=min(self.steps, num_steps - rounds))


NEVER = 2**30
MAX_ROUNDS = 8


def num_windows(behind: Sequence[int], window: int) -> int:
    """Windows of `window` that stretches of so many tokens are cut into."""
    return sum(-(-tokens // window) for tokens in behind)


def plan_segment(
    load: Load,
    plan: Plan,
    *,
    step_s: float,
    visit_s: float,
    segment_steps: int,
    max_prefill_passes: int,
    prefill_rows: int,
    prefill_window: int,
    smaller_batch: int,
) -> Segment:
    """How long to run `plan`, and how the prompts of rows that are behind get their share of the passes.

    While some rows decode, nobody of them waits for more than `max_prefill_passes` passes over prompts: these and steps take
    turns until all rows decode, but for stretches that fit into the windows which the step's own pass leaves empty.

    A row that ended idles until the host looks, and looking costs everybody `visit_s`. So the host looks when idling has
    cost as much as looking will, which is at most twice what the best moment would have cost.

    Args:
        load: what is in the rows.
        plan: what steps them.
        step_s: seconds of one step with the batch full.
        visit_s: seconds that the device idles when the host looks.
        segment_steps: most tokens a row may gain before the host looks.
        max_prefill_passes: most passes over prompts between two steps.
        prefill_rows, prefill_window: the budget of a pass over prompts and its windows.
        smaller_batch: rows that the next cheaper batch holds, 0 if there is none.
    """
    steps = max(1, segment_steps // plan.window)
    if load.waiting:
        max_idle, min_live = max(1, round(visit_s * plan.batch / max(step_s, 1e-9))), 1
    else:
        max_idle, min_live = NEVER, smaller_batch + 1
    passes = -(-num_windows(load.behind, prefill_window) * prefill_window // prefill_rows) + load.unread_chunks
    if load.num_ready == 0:
        return Segment(1, passes, steps - 1, max_idle, min_live)
    if not load.unread_chunks and num_windows(load.behind, plan.window) <= empty_windows(plan, load):
        return Segment(0, 0, steps, max_idle, min_live)
    at_once = min(passes, max_prefill_passes)
    rounds = -(-passes // at_once)
    if rounds > MAX_ROUNDS:
        return Segment(MAX_ROUNDS, at_once, 0, max_idle, min_live)
    return Segment(rounds, at_once, max(0, steps - rounds), max_idle, min_live)


def empty_windows(plan: Plan, load: Load) -> int:
    """Windows of a step's last pass that verify nothing."""
    verified = 0 if plan.fast else load.num_ready if plan.window == 1 else load.ready_deterministic
    return -verified % (plan.rows // plan.window) if not plan.fast else 0
