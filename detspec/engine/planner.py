"""Which plans an engine has, which of them it may use, and which it uses next."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from detspec.checkpoint.load import Model
from detspec.engine.certify import Certificate, certify, certify_reading
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Plan, allowed_windows, canonical_plans, choose, fast_plan, needed_batches
from detspec.engine.request import Stats
from detspec.engine.step_times import StepTimes
from detspec.engine.trial import Trial, time_plans
from detspec.errors import InputError
from detspec.schedule import Schedule
from detspec.state import GenState

PRIOR_ACCEPTANCE = 0.99
PRIOR_TOKENS = 200  # drafted tokens that the assumed acceptance counts as, until real ones outweigh them
WORTH_DRAFTING = 0.8  # "auto" tries the self draft where a fast step takes less than this share of a canonical one
CANNOT_WIN = "not tried: a fast step costs as much as a canonical one, so drafting cannot win"


class Planner:
    """Compiles, certifies and times plans when they are first needed, and chooses among them by what is live."""

    def __init__(self, model: Model, schedule: Schedule, config: EngineConfig, *, num_pages: int) -> None:
        """Knows no plan yet."""
        self.model = model
        self.certificates: dict[Plan, Certificate] = {}
        self.step_times = StepTimes()
        self._schedule, self._config, self._num_pages = schedule, config, num_pages
        self._batches: tuple[int, ...] = ()
        self._examined: set[int] = set()  # batches whose canonical plans are known
        self._reading_certified = False

    def lacks(self, num_requests: int, deterministic: bool) -> bool:
        """Whether `prepare` has something to do."""
        known = self._examined if deterministic else self._batches
        return any(batch not in known for batch in needed_batches(self._config, num_requests))

    def prepare(self, state: GenState, num_requests: int, deterministic: bool) -> GenState:
        """Makes the plans for a run of `num_requests` in `state`, all rows free; canonical ones only if they are needed."""
        for batch in needed_batches(self._config, num_requests):
            if batch not in self._batches:
                state = self._certify(state, fast_plan(batch))
                state = self._time(state, [fast_plan(batch)])
                self._batches = tuple(sorted((*self._batches, batch)))
            if self.model.cfg.thinking is not None and not self._reading_certified:
                state = self._certify_reading(state)
            if deterministic and batch not in self._examined:
                for window in allowed_windows(self._config, self._schedule):
                    state = self._certify_window(state, batch, window)
                self._examined.add(batch)
        return state

    def choose(self, num_deterministic: int, num_ordinary: int, stats: Stats) -> tuple[Plan, bool]:
        """The plan for the next segment: the smallest batch that fits, filled the way that commits most tokens per second.

        Returns:
            The plan, and whether it is merely to be tried for a few steps, because it has not run for long.

        Raises:
            InputError: a deterministic request is live, and this device certified no plan that is large enough.
        """
        num_live = num_deterministic + num_ordinary
        if num_deterministic == 0:
            return fast_plan(min(batch for batch in self._batches if batch >= num_live)), False
        batches = [batch for batch in self._batches if batch >= num_live and self._usable(batch)]
        if not batches:
            raise InputError(self._refusal(num_live))
        plans = self._usable(min(batches))
        accepted = stats.num_accepted_draft_tokens + PRIOR_ACCEPTANCE * PRIOR_TOKENS
        acceptance = accepted / (stats.num_draft_tokens + PRIOR_TOKENS)
        times = self.step_times
        best, chosen = (
            choose({plan: step_s(plan) for plan in plans}, num_deterministic, num_ordinary, acceptance)
            for step_s in (times.known, times.hoped)
        )
        times.passed_over(plan for plan in plans if plan != chosen)
        return chosen, chosen != best

    def smaller_batch(self, plan: Plan) -> int:
        """The next smaller batch that the live rows of `plan` could move to; 0 if there is none."""
        return max((batch for batch in self._batches if batch < plan.batch and (plan.fast or self._usable(batch))), default=0)

    def _certify_window(self, state: GenState, batch: int, window: int) -> GenState:
        """Tries the plans of one window size until one is certified, and times it beside the others of its batch."""
        for plan in canonical_plans(batch, window, self._schedule.budget.rows):
            if self._config.method == "auto" and window > 1 and not self._draft_can_win(batch):
                self.certificates[plan] = Certificate(plan, equal=False, differs=CANNOT_WIN)
                break
            state = self._certify(state, plan)
            if self.certificates[plan].equal:
                state = self._time(state, [fast_plan(batch), *self._usable(batch)])
                break
        return state

    def _usable(self, batch: int) -> list[Plan]:
        """Certified plans of `batch` rows."""
        return [plan for plan, certificate in self.certificates.items() if plan.batch == batch and certificate.equal]

    def _draft_can_win(self, batch: int) -> bool:
        """A window of W costs W-1 fast steps and a pass at least as dear as a canonical step: it gains only if those differ."""
        decoding = [self.certificates[plan].step_s for plan in self._usable(batch) if plan.window == 1]
        return not decoding or self.certificates[fast_plan(batch)].step_s < WORTH_DRAFTING * min(decoding)

    def _certify_reading(self, state: GenState) -> GenState:
        """Raises `InputError` if thoughts depend on rows or guesses on this device."""
        differs, state = certify_reading(state, self._trial(state, fast_plan(self._config.max_requests)))
        if differs:
            raise InputError(
                f"this device does not certify reading with thoughts, so determinism cannot be promised: {differs}. Try "
                'Schedule(Numerics(linear="pinned"))'
            )
        self._reading_certified = True
        return _free(state)

    def _certify(self, state: GenState, plan: Plan) -> GenState:
        trial = self._trial(state, plan)
        self.certificates[plan], state = certify(self.model.params, self.model.cfg, state, trial, schedule=self._schedule)
        return _free(state)

    def _time(self, state: GenState, plans: Sequence[Plan]) -> GenState:
        seconds, state = time_plans([self._trial(state, plan) for plan in plans], state)
        self.step_times.measured(seconds)
        for plan in plans:
            self.certificates[plan] = dataclasses.replace(self.certificates[plan], step_s=seconds[plan])
        return _free(state)

    def _trial(self, state: GenState, plan: Plan) -> Trial:
        return Trial(
            *(self.model.params, self.model.cfg, state, plan),
            num_pages=self._num_pages,
            schedule=self._schedule,
            guesses=self._config.guesses,
        )

    def _refusal(self, num_live: int) -> str:
        found = "; ".join(
            f"{plan.label}: {certificate.differs}"
            for plan, certificate in self.certificates.items()
            if plan.batch >= num_live and not plan.fast
        )
        return (
            f"this device does not certify the canonical pass at {num_live} rows, so determinism cannot be promised. {found}. "
            'Run `detspec doctor`. If only window offsets fail there, use Schedule(Numerics(alignment="window")); if numbers '
            'of rows do, use Schedule(Numerics(linear="pinned"))'
        )


def _free(state: GenState) -> GenState:
    """`state` with no row live."""
    return state.replace(live=jnp.zeros_like(state.live))
