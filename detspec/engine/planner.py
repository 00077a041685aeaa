"""Which plans an engine has, which of them it may use, and which it uses next."""

import dataclasses
from collections.abc import Sequence

from detspec.engine.certify import DIFFERS, NOT_TRIED, Certificate, certify, certify_thoughts, time_plans
from detspec.engine.device import Device
from detspec.engine.policy import Plan, allowed_drafts, canonical_plans, choose, needed_batches, ordinary_plan
from detspec.engine.step_times import Acceptance, StepTimes
from detspec.errors import InputError

WORTH_DRAFTING = 0.8  # "auto" tries a draft whose cost is less than this share of the canonical steps that it may save
CANNOT_WIN = "drafting a window costs as much as the canonical steps that it can save"


class Planner:
    """Compiles, certifies and times plans when they are first needed, and chooses among them by what is live."""

    def __init__(self, device: Device) -> None:
        self.certificates: dict[Plan, Certificate] = {}
        self.step_times = StepTimes()
        self.acceptance = Acceptance(device.drafters)
        self._device = device
        self._batches: tuple[int, ...] = ()
        self._examined: set[int] = set()  # batches whose canonical plans are known
        self._thoughts_certified = False

    def lacks(self, num_requests: int, deterministic: bool) -> bool:
        """Whether `prepare` has something to do."""
        known = self._examined if deterministic else self._batches
        return any(batch not in known for batch in needed_batches(self._device.config, num_requests))

    def prepare(self, num_requests: int, deterministic: bool) -> None:
        """Makes the plans for `num_requests` at once, canonical ones only if they are needed; all places must be free.

        Raises `InputError` if thoughts depend on places or drafts on this device.
        """
        device = self._device
        device.start_compiling(self._first_plans(num_requests, deterministic))
        for batch in needed_batches(device.config, num_requests):
            if batch not in self._batches:
                self._certify(ordinary_plan(batch))
                self._time([ordinary_plan(batch)])
                self._batches = tuple(sorted((*self._batches, batch)))
            if device.model.cfg.thinking is not None and not self._thoughts_certified:
                self._certify_thoughts()
            if deterministic and batch not in self._examined:
                custom = [name for name in device.drafters if name not in ("none", "self")]
                for draft, window in allowed_drafts(device.config, device.schedule, custom):
                    self._certify_draft(batch, draft, window)
                self._examined.add(batch)

    def _first_plans(self, num_requests: int, deterministic: bool) -> list[Plan]:
        """Plans that `prepare` tries for sure."""
        plans = []
        for batch in needed_batches(self._device.config, num_requests):
            if batch not in self._batches:
                plans.append(ordinary_plan(batch))
            if deterministic and batch not in self._examined:
                draft, window = allowed_drafts(self._device.config, self._device.schedule)[0]
                plans.append(canonical_plans(batch, window, self._device.schedule.budget.rows, draft)[0])
        return plans

    def choose(self, num_deterministic: int, num_ordinary: int) -> tuple[Plan, bool]:
        """The plan for the next segment: the smallest batch that fits, filled the way that commits most tokens per second.

        Returns it, and whether it is merely to be tried for a few steps, because it has not run for long.

        Raises `InputError` if a deterministic request is live, and this device certified no plan that is large enough.
        """
        num_live = num_deterministic + num_ordinary
        if num_deterministic == 0:
            return ordinary_plan(min(batch for batch in self._batches if batch >= num_live)), False
        batches = [batch for batch in self._batches if batch >= num_live and self._usable(batch)]
        if not batches:
            raise InputError(self._refusal(num_live))
        plans = self._usable(min(batches))
        for plan in plans:  # each draft shows once what it is worth; then estimates decide
            if plan.budget.window > 1 and len(plans) > 1 and not self.acceptance.was_seen(plan):
                return plan, True
        tokens = {plan: self._step_tokens(plan, num_deterministic, num_ordinary) for plan in plans}
        best = choose({plan: self.step_times.known(plan) for plan in plans}, tokens)
        chosen = choose({plan: self.step_times.hoped(plan) for plan in plans}, tokens)
        self.step_times.passed_over(plan for plan in plans if plan != chosen)
        return chosen, chosen != best

    def smaller_batch(self, plan: Plan) -> int:
        """The next smaller batch that the live sequences of `plan` could move to; 0 if there is none."""
        smaller = (batch for batch in self._batches if batch < plan.batch)
        return max((batch for batch in smaller if plan.ordinary or self._usable(batch)), default=0)

    def _step_tokens(self, plan: Plan, num_deterministic: int, num_ordinary: int) -> float:
        """Tokens that one step is expected to commit: ordinary sequences take an executing draft as it is."""
        if plan.budget.window == 1:
            return num_deterministic + num_ordinary
        source = self._device.drafters[plan.draft].source
        verified = self.acceptance.tokens(plan)
        return num_deterministic * verified + num_ordinary * (plan.budget.window - 1 if source.executes else verified)

    def _certify_draft(self, batch: int, draft: str, window: int) -> None:
        """Tries the plans of one draft until one is certified, and times it in turns with the others of its batch."""
        device = self._device
        for plan in canonical_plans(batch, window, device.schedule.budget.rows, draft):
            if device.config.method == "auto" and window > 1 and not self._draft_can_win(batch, draft, window):
                self.certificates[plan] = Certificate(plan, NOT_TRIED, CANNOT_WIN)
                break
            self._certify(plan)
            if self.certificates[plan].is_certified:
                self._time([ordinary_plan(batch), *self._usable(batch)])
                break

    def _usable(self, batch: int) -> list[Plan]:
        """Certified plans of `batch` sequences."""
        return [plan for plan, certificate in self.certificates.items() if plan.batch == batch and certificate.is_certified]

    def _draft_can_win(self, batch: int, draft: str, window: int) -> bool:
        """Whether a draft costs less than what it can save: `W - 1` canonical steps, if all of it is accepted."""
        decoding = [self.step_times.known(plan) for plan in self._usable(batch) if plan.budget.window == 1]
        if not decoding:
            return True
        cost_s = self._device.drafters[draft].source.cost_s(window, self.step_times.known(ordinary_plan(batch)))
        return cost_s < WORTH_DRAFTING * (window - 1) * min(decoding)

    def _certify_thoughts(self) -> None:
        if differs := certify_thoughts(self._device, self._device.config.max_requests):
            raise InputError(
                f"this device does not certify thoughts, so determinism cannot be promised: {differs}. Try "
                'Schedule(Numerics(linear="pinned"))'
            )
        self._thoughts_certified = True
        self._device.clear()

    def _certify(self, plan: Plan) -> None:
        self.certificates[plan] = certify(self._device, plan)
        self._device.clear()

    def _time(self, plans: Sequence[Plan]) -> None:
        seconds = time_plans(self._device, plans)
        self._device.clear()
        self.step_times.measured(seconds)
        for plan in plans:
            self.certificates[plan] = dataclasses.replace(self.certificates[plan], step_s=seconds[plan])

    def _refusal(self, num_live: int) -> str:
        found = "; ".join(
            f"{plan.label}: {certificate.why}"
            for plan, certificate in self.certificates.items()
            if plan.batch >= num_live and certificate.status == DIFFERS
        )
        return (
            f"this device does not certify the canonical pass at {num_live} sequences, so determinism cannot be promised. "
            f'{found}. Run `detspec doctor`. If only window offsets fail there, use Schedule(Numerics(alignment="window")); if '
            'numbers of rows do, use Schedule(Numerics(linear="pinned"))'
        )
