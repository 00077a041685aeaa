"""Measured facts: what a step of each plan takes and brings, kept true while plans run, and how long the device waits."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping

from detspec.draft.source import Drafter
from detspec.engine.policy import Plan

WEIGHT = 0.5  # weight of a segment that was slower than believed; one that was faster is believed, because noise only ever adds
MOST_GROWTH = 2.0  # a process that was held up once says little about the plan
OPTIMISM = 0.99  # a plan is hoped to be this much cheaper for each segment that another was chosen for
FEW_STEPS = 8  # a segment of fewer counts for less, in streams one of a single step for an eighth
PRIOR_WINDOWS = 4  # verified windows that the assumed acceptance counts as
REMEMBERED_WINDOWS = 192  # older windows count less and less: texts change

Observe = Callable[[Plan, float, int], None]  # is told the seconds of each of a number of steps of a plan


class StepTimes:
    """Seconds of one step of each plan with its batch full.

    Times that were taken while other processes were busy may be wrong by any factor, so a plan is timed again as it runs. Each
    time a plan is skipped its estimate drops by 1 %, so that it is eventually retried for a few steps. Segments of few steps
    count for less: one step takes a random time, and a plan retried every few steps would cost a share of all steps.
    """

    def __init__(self) -> None:
        self._seconds: dict[Plan, float] = {}
        self._hope: dict[Plan, float] = {}

    def measured(self, seconds: Mapping[Plan, float]) -> None:
        """Takes over what plans took side by side."""
        self._seconds.update(seconds)
        self._hope.update(dict.fromkeys(seconds, 1.0))

    def observed(self, plan: Plan, seconds: float, num_steps: int) -> None:
        """Takes what each of `num_steps` took; the mean counts if steps skip drafts, since fast ones bring fewer tokens."""
        known = self._seconds.get(plan, seconds)
        weight = WEIGHT if plan.skips or seconds > known else 1.0
        self._seconds[plan] = known + weight * _share(num_steps) * (min(seconds, MOST_GROWTH * known) - known)
        self._hope[plan] = 1.0

    def passed_over(self, plans: Iterable[Plan], num_steps: int) -> None:
        """Plans that might have run for `num_steps` and did not."""
        for plan in plans:
            self._hope[plan] = OPTIMISM ** _share(num_steps) * self._hope.get(plan, 1.0)

    def known(self, plan: Plan) -> float:
        """The estimate for `plan`; inf if it neither was timed nor ran yet."""
        return self._seconds.get(plan, float("inf"))

    def hoped(self, plan: Plan) -> float:
        """The estimate for `plan`, or less if it has not run for a while."""
        return self.known(plan) * self._hope.get(plan, 1.0)


def _share(num_steps: int) -> float:
    """Weight of a segment of `num_steps`."""
    return min(1.0, num_steps / FEW_STEPS)


class Acceptance:
    """Drafted tokens that one verified window of each draft source brings, from what was verified lately."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._counts: dict[Hashable, tuple[float, float]] = {}  # windows, accepted tokens; older ones count less

    def was_seen(self, plan: Plan) -> bool:
        """Whether windows of this draft were verified yet."""
        return _drafting(plan) in self._counts

    def executes(self, plan: Plan) -> bool:
        """Whether drafting runs the model, so that ordinary sequences take the draft as it is."""
        return self._drafters[plan.draft].source.executes

    def observed(self, plan: Plan, windows: int, accepted: int) -> None:
        """Counts `windows` more that `plan` verified, and the drafted tokens that were accepted in them."""
        if plan.num_drafts and windows:
            keep = max(0.0, 1 - windows / REMEMBERED_WINDOWS)
            before = self._counts.get(_drafting(plan), (0.0, 0.0))
            self._counts[_drafting(plan)] = keep * before[0] + windows, keep * before[1] + accepted

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
