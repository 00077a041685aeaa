"""The plans of a device, and which of them requests may use.

What requests need first is one plan: canonical decoding of their batch, or ordinary decoding. The others of `prepare`, drafts
and smaller batches, only make it faster, and are compiled once it has run for a while.
"""

import contextlib
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from detspec.draft.table import SOURCES
from detspec.engine.agreement import Agreement, Alone
from detspec.engine.certify import (
    DIFFERS,
    NOT_TRIED,
    Certificate,
    Times,
    certifies_answers,
    certifies_large_prefill,
    certify,
    certify_reader,
    time_plans,
)
from detspec.engine.decide import Acceptance, Facts, Load, StepTimes
from detspec.engine.device import Device
from detspec.engine.policy import Drafting, Needs, Plan, allowed_drafts, canonical_plans, needed_batches, ordinary_plan
from detspec.errors import DivergenceError, InputError
from detspec.riders.riding import reader_of

LOG = logging.getLogger("detspec")
WORTH_DRAFTING = 0.8  # one of several drafts is tried if it costs less than this share of the canonical steps it may save
CANNOT_WIN = "drafting a window costs as much as the canonical steps that it can save"
PREFILL = "prefill"
REPLAYS = "likeliest tokens"


class Planner:
    """Compiles, certifies and times plans when they are first needed."""

    def __init__(self, device: Device, agreement: Agreement | None = None) -> None:
        self.certificates: dict[Plan, Certificate] = {}
        self.step_times = StepTimes()
        self.acceptance = Acceptance(device.drafters)
        self._device = device
        self._agreement = agreement or Alone()
        self._drafts = allowed_drafts(device.config, device.schedule, [name for name in device.drafters if name not in SOURCES])
        self._rows = device.schedule.budget.rows
        self._tried: set[tuple[int, bool, Drafting]] = set()  # batch, processing
        self._reader_certified = False
        self._tried_large = False  # large passes over prompts
        self._tried_answers = False  # passes over prompts that give the token after each
        self.coming: tuple[Plan, ...] = ()  # plans that are being made behind what runs
        self.failed: dict[str, Plan | None] = {}  # labels of what raised while it was made behind, with the plan that it is

    def lacks(self, num_requests: int, needs: Needs) -> bool:
        """Whether `num_requests` at once cannot run yet: there is no plan that was made for so many, and for what they need.

        Ordinary ones also run by canonical plans while theirs are coming, and where they could not be made.
        """
        num_requests = min(num_requests, self._device.config.max_requests)

        def is_made(plans: Iterable[Plan]) -> bool:
            return any(plan.batch >= num_requests and plan.processing >= needs.processing for plan in plans)

        lacks_canonical = needs.deterministic and not is_made(plan for plan in self.certificates if not plan.ordinary)
        lacks_ordinary = needs.ordinary and not is_made(plan for plan in self.certificates if plan.ordinary)
        if lacks_ordinary and is_made(plan for plan in (*self.coming, *filter(None, self.failed.values())) if plan.ordinary):
            lacks_ordinary = not is_made(plan for plan, certificate in self.certificates.items() if certificate.is_certified)
        return num_requests > 0 and (lacks_canonical or lacks_ordinary)

    def lacks_any(self, batches: Sequence[int], needs: Needs) -> bool:
        """Whether `prepare` has something to do."""
        return self._lacks_prefill(needs) or not all(self._is_complete(batch, needs) for batch in batches)

    def prepare_first(self, num_requests: int, needs: Needs) -> None:
        """Makes one plan for `num_requests` at once, or one of each kind that they need; all places must be free.

        More requests than there are places need the largest batch. Raises `InputError` if what a rider reads in prompts depends
        on places or drafts on this device.
        """
        if not self.certificates:  # nothing has been prefilled yet
            self._device.prefills_apart = self._device.may_prefill_apart and not needs.deterministic
        for batch in needed_batches(self._device.config, num_requests)[-1:]:
            self._device.start_compiling(self._surely_tried([batch], needs))
            self._certify_reader()
            for drafting in self._drafts if needs.deterministic else ():
                if not self._usable(batch, needs.processing):
                    deque(self._try_draft(batch, needs.processing, drafting), maxlen=0)
            if needs.ordinary:
                self._make_ordinary(batch, needs.processing)

    def prepare(self, batches: Sequence[int], needs: Needs) -> None:
        """Makes all plans of `batches` and times them in turns, canonical ones only if they are needed; see `making`."""
        self._device.start_compiling(
            self._surely_tried(self._incomplete(batches, needs), needs._replace(ordinary=True)), apart=True
        )
        deque(self.making(batches, needs), maxlen=0)

    def making(self, batches: Sequence[int], needs: Needs, *, optional: bool = False) -> Iterator[tuple[Plan, ...]]:
        """Does what `prepare` does in pieces; yields before each the plans whose programs it runs.

        If they are `optional`, a piece that raises, or into which an error is thrown, is put aside: what it was to make is in
        `failed`, and not tried again. All that was certified before stays so, and the next piece follows.

        If prefill shared its program so far and may have one of its own, it gets it, and plans that were certified with the
        other are certified anew, all in the first piece. So are passes over prompts that answer, and large ones.

        All places must be free whenever it goes on. Raises `DivergenceError` and, unless they are optional, what certifying
        raises: `InputError` if what a rider reads depends on places or drafts on this device.
        """
        with self._attempt(PREFILL, optional=optional):
            yield tuple(self._certified()) if self._lacks_prefill(needs) else ()
            if self._lacks_prefill(needs):
                self._make_prefill(needs)
            self._certify_reader()
        for batch in self._incomplete(batches, needs):
            ordinary = ordinary_plan(batch, needs.processing)
            if ordinary not in self.certificates and ordinary.label not in self.failed:
                with self._attempt(ordinary.label, ordinary, optional=optional):
                    yield (ordinary,)
                    self._make_ordinary(batch, needs.processing)
            for drafting in self._drafts if needs.deterministic else ():
                if (batch, needs.processing, drafting) not in self._tried:
                    yield from self._try_draft(batch, needs.processing, drafting, optional=optional)
            with self._attempt(_times_label(batch, needs.processing), optional=optional):
                yield ()
                self._time(batch, needs.processing)

    def making_replays(self) -> Iterator[None]:
        """Yields None once: then replays are compiled that say likeliest tokens. An error that is thrown in is put aside."""
        if REPLAYS not in self.failed:
            with self._attempt(REPLAYS, optional=True):
                yield None

    def forget_programs(self) -> None:
        """Forgets what is known of programs, which are others from now on; their times remain estimates."""
        self.certificates.clear()
        self._tried.clear()
        self._reader_certified = False
        self._tried_large = self._device.prefills_large = False
        self._tried_answers = self._device.answers = False
        self.coming = ()
        self.failed.clear()

    def missing(self, batches: Sequence[int], needs: Needs) -> tuple[Plan, ...]:
        """The plans that `making` will try at least, in its order."""
        return tuple(
            plan
            for batch in batches
            for plan in (
                ordinary_plan(batch, needs.processing),
                *(self._first_of(batch, needs, drafting) for drafting in self._drafts if needs.deterministic),
            )
            if plan not in self.certificates and plan.label not in self.failed
        )

    def facts(self, visit_s: float) -> Facts:
        """Facts by now; `visit_s` are the seconds of a look at the device."""
        ordinary = [plan for plan in self.certificates if plan.ordinary]
        answers = self._device.answers
        return Facts(self._certified(), ordinary, self.step_times, self.acceptance, visit_s, answers)

    def refusal(self, load: Load) -> InputError:
        """The error if no certified plan is large enough for `load`."""
        num_live = load.num_deterministic + load.num_ordinary
        found = "; ".join(
            f"{plan.label}: {certificate.why}"
            for plan, certificate in self.certificates.items()
            if plan.batch >= num_live and certificate.status == DIFFERS
        )
        return InputError(
            f"this device does not certify the canonical pass at {num_live} sequences, so determinism cannot be promised. "
            f'{found}. Run `detspec doctor`. If only window offsets fail there, use Schedule(Numerics(alignment="window")); if '
            'numbers of rows do, use Schedule(Numerics(linear="pinned"))'
        )

    def _usable(self, batch: int, processing: bool) -> list[Plan]:
        """Certified plans of `batch` sequences."""
        return [
            plan
            for plan, certificate in self.certificates.items()
            if certificate.is_certified and (plan.batch, plan.processing) == (batch, processing)
        ]

    def _is_complete(self, batch: int, needs: Needs) -> bool:
        """Whether all plans of a batch have been made and timed."""
        plan = ordinary_plan(batch, needs.processing)
        is_timed = plan in self.certificates and math.isfinite(self.certificates[plan].step_s)
        is_given_up = not {plan.label, _times_label(batch, needs.processing)}.isdisjoint(self.failed)
        is_tried = all((batch, needs.processing, drafting) in self._tried for drafting in self._drafts)
        return (is_timed or is_given_up) and (is_tried or not needs.deterministic)

    def _incomplete(self, batches: Sequence[int], needs: Needs) -> list[int]:
        """Batches of which not all plans have been made and timed."""
        return [batch for batch in batches if not self._is_complete(batch, needs)]

    def _surely_tried(self, batches: Sequence[int], needs: Needs) -> list[Plan]:
        """The plans that will be tried in any case, those that take longest to compile first."""
        first = self._drafts[:1] if needs.deterministic else ()
        return [
            plan
            for batch in batches
            for plan in (
                *(self._first_of(batch, needs, way) for way in first if (batch, needs.processing, way) not in self._tried),
                *([ordinary_plan(batch, needs.processing)] if needs.ordinary else []),
            )
            if plan not in self.certificates
        ]

    def _first_of(self, batch: int, needs: Needs, drafting: Drafting) -> Plan:
        """The plan of one way to draft that is tried first."""
        return canonical_plans(batch, self._rows, drafting, processing=needs.processing)[0]

    def _make_ordinary(self, batch: int, processing: bool) -> None:
        plan = ordinary_plan(batch, processing)
        if plan not in self.certificates:
            self._certify(plan)

    def _try_draft(
        self, batch: int, processing: bool, drafting: Drafting, *, optional: bool = False
    ) -> Iterator[tuple[Plan, ...]]:
        """Tries the plans of one way to draft until one is certified; yields each before."""
        for plan in canonical_plans(batch, self._rows, drafting, processing=processing):
            with self._attempt(plan.label, plan, optional=optional):
                if self._device.config.chooses and plan.num_drafts and not self._draft_can_win(plan):
                    self.certificates[plan] = Certificate(plan, NOT_TRIED, CANNOT_WIN)
                    break
                yield (plan,)
                self._certify(plan)
                if self.certificates[plan].is_certified:
                    break
        self._tried.add((batch, processing, drafting))

    @contextlib.contextmanager
    def _attempt(self, label: str, plan: Plan | None = None, *, optional: bool) -> Iterator[None]:
        """Logs an error inside and puts `label` and its `plan` aside, if they are optional."""
        try:
            yield
        except DivergenceError:
            raise
        except Exception as error:
            if not optional:
                raise
            LOG.error("%s cannot be made, requests go on without it", label, exc_info=error)
            self.failed[label] = plan
            self._device.clear()
            self._device.wait()  # raises if what failed has taken the state along, without which nothing runs

    def _certified(self) -> list[Plan]:
        """The plans that deterministic requests may use."""
        return [plan for plan, certificate in self.certificates.items() if certificate.is_certified]

    def _lacks_prefill(self, needs: Needs) -> bool:
        """Whether prefill is yet to get programs of its own, or what they can do is yet to be certified."""
        device = self._device
        lacks_own = device.may_prefill_apart and not device.prefills_apart
        lacks_large = device.may_prefill_large and not self._tried_large
        return (lacks_own or lacks_large or self._lacks_answers(needs)) and PREFILL not in self.failed

    def _lacks_answers(self, needs: Needs) -> bool:
        """Whether answers of passes over prompts are yet to be certified; for ordinary requests alone nothing is."""
        return self._device.may_answer and needs.deterministic and not self._tried_answers

    def _make_prefill(self, needs: Needs) -> None:
        """Gives prefill its own program; then answers and large passes, as far as they are certified."""
        device = self._device
        if not device.prefills_apart:
            self._move_prefill()
        if self._lacks_answers(needs):
            self._tried_answers = True
            device.answers = self._certifies("answers of passes over prompts", certifies_answers)
        if device.may_prefill_large and not self._tried_large:
            self._tried_large = True
            device.prefills_large = self._certifies("large passes over prompts", certifies_large_prefill)

    def _certifies(self, what: str, certifies_fn: Callable[[Device], bool]) -> bool:
        """Asks whether the device certifies something; all processes that share it must find the same."""
        is_certified = self._agreement.watched(partial(certifies_fn, self._device))
        self._agreement.check(f"{what}: {is_certified}")
        self._device.clear()
        return is_certified

    def _move_prefill(self) -> None:
        """Gives prefill its own program, and certifies anew what was certified with the other, which stays if this raises."""
        before = dict(self.certificates)
        was_reader_certified = self._reader_certified
        self._device.prefills_apart = True
        self._reader_certified = False  # a rider reads prompts in the program that prefills
        try:
            for plan in self._certified():  # what requests needed meanwhile, too
                self._certify(plan)
            self._certify_reader()
        except Exception:
            self._device.prefills_apart = False
            self._reader_certified = was_reader_certified
            self.certificates.update(before)
            raise

    def _draft_can_win(self, plan: Plan) -> bool:
        """Whether a draft costs less than what it can save: a canonical step for each token, if all of it is accepted."""
        usable = self._usable(plan.batch, plan.processing)
        decoding = [other for other in usable if not other.num_drafts]
        source = self._device.drafters[plan.draft].source
        if not decoding or source.cost_s(plan.num_drafts, 1.0) == 0:
            return True
        self._time(plan.batch, plan.processing)
        cost_s = source.cost_s(plan.num_drafts, self.step_times.known(ordinary_plan(plan.batch, plan.processing)))
        return cost_s < WORTH_DRAFTING * plan.num_drafts * min(map(self.step_times.known, decoding))

    def _certify_reader(self) -> None:
        rider = reader_of(self._device.riders)
        if rider is None or self._reader_certified:
            return
        if differs := certify_reader(self._device, self._device.config.max_requests):
            raise InputError(
                f"this device does not certify {rider.name}, so determinism cannot be promised: {differs}. Try "
                'Schedule(Numerics(linear="pinned"))'
            )
        self._reader_certified = True
        self._device.clear()

    def _certify(self, plan: Plan) -> None:
        certificate = self._agreement.watched(partial(certify, self._device, plan))
        self._agreement.check(f"{plan.label}: {certificate.status} {certificate.why}")
        self.certificates[plan] = certificate
        self.failed.pop(plan.label, None)
        self._device.clear()

    def _time(self, batch: int, processing: bool) -> None:
        """Times the plans of a batch, in turns, unless all of them have been timed."""
        ordinary = ordinary_plan(batch, processing)
        plans = [*([ordinary] if ordinary in self.certificates else []), *self._usable(batch, processing)]
        if all(math.isfinite(self.certificates[plan].step_s) for plan in plans):
            return
        measured = self._agreement.watched(partial(time_plans, self._device, plans))
        agreed = iter(self._agreement.same([seconds for plan in plans for seconds in measured[plan]]))
        times = {plan: Times(next(agreed), next(agreed)) for plan in plans}
        self._device.clear()
        self._device.wide_costs |= {plan: found.wide_s / found.step_s for plan, found in times.items()}
        seconds = {plan: found.step_s for plan, found in times.items()}
        self.step_times.measured(seconds)
        for plan in plans:
            self.certificates[plan] = dataclasses.replace(self.certificates[plan], step_s=seconds[plan])


def _times_label(batch: int, processing: bool) -> str:
    """The name of a batch's times where plans have labels."""
    return f"times{' processing' if processing else ''}[{batch}]"
