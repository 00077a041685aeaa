"""Order in which a device gets programs: first what requests need at once, the rest once it has run for a while, or behind.

Behind means while requests run: another thread compiles, and what is compiled is tried between two segments. A trial needs all
places, so requests stand still and catch up afterwards. It takes tenths of a second, compiling takes many. Where nothing is in
flight a trial comes at once, else so rarely that trials take a tenth of the time.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future

from detspec.engine.device import Device
from detspec.engine.planner import REPLAYS, Planner
from detspec.engine.policy import Needs, Plan, needed_batches, worth_making

SHARE = 0.1  # trials take this share of the time while requests run
IMPROVED_AFTER = 4096  # steps and passes over prompts: then all that makes a job faster is worth seconds of compiling


class Preparation:
    """Makes the programs of one device.

    Attributes:
        is_behind: what makes requests faster is compiled while they run; else in a step.
        behind: programs that are made so now; None if none are.
    """

    def __init__(self, device: Device, planner: Planner, empty_fn: Callable[[], None]) -> None:
        """`empty_fn` takes all sequences out of their places, to go on to the same bits later; trials need that."""
        self.is_behind = False
        self.behind: Behind | None = None
        self._device = device
        self._planner = planner
        self._empty = empty_fn
        self._improves = True
        self._needs = Needs()  # needs that were prepared for behind
        self._passes: Counter[int] = Counter()  # for each batch, steps and passes over prompts since plans were made

    def ahead(self, num_requests: int | None, needs: Needs, *, first_only: bool) -> None:
        """Makes what `num_requests` at once need, None for any traffic; `first_only` for what they need to run at all."""
        num_requests = self._everything if num_requests is None else num_requests
        if first_only:
            self._make_first(num_requests, needs)
        else:
            self._make_all(needed_batches(self._device.config, num_requests), needs)
            self._improves = False

    def all_behind(self, needs: Needs) -> None:
        """Makes one program that can run all that `needs` say, and begins to make the others behind."""
        self._needs = needs
        self._improves = False
        batches = needed_batches(self._device.config, self._everything)
        self._planner.coming = self._planner.missing(batches, needs)  # also while the first is made
        self._make_first(self._everything, needs._replace(ordinary=not needs.deterministic))
        self._make_behind(batches, needs, replays=True)

    def for_requests(self, num_requests: int, needs: Needs, *, is_running: bool) -> None:
        """Makes the programs that so many need; where some run already, traffic grows, so those of the largest batch.

        The others that would make them faster follow when many steps have run, for the batches that took part in these.
        """
        if self._planner.lacks(num_requests, needs):
            self._make_first(self._device.config.max_requests if is_running else num_requests, needs)
        if self._improves and self._passes.total() >= IMPROVED_AFTER:
            batches = worth_making(self._passes)
            self._passes.clear()
            if not self.is_behind:
                self._make_all(batches, needs)
            elif self.behind is None and self._planner.lacks_any(batches, needs):
                self._make_behind(batches, needs)

    def for_other_room(self) -> None:
        """Begins anew: programs are others from now on. Where all was prepared, requests wait for one program, once."""
        self._planner.forget_programs()
        self.behind = None  # programs on their way have the room that there was
        if self.is_behind and not self._improves:
            self.all_behind(self._needs)
        elif not self._improves:
            self._make_first(self._device.config.max_requests, Needs())
            self._improves = True

    def observed(self, batch: int, num_passes: int) -> None:
        """So many steps and passes over prompts ran, with sequences that fit into `batch`."""
        self._passes[batch] += num_passes

    def go_on(self, *, is_idle: bool) -> bool:
        """Tries a program that was compiled behind, if one is there and the time has come; returns whether it did."""
        if self.behind is None or not self.behind.is_due(is_idle=is_idle):
            return False
        self._empty()
        self.behind.go_on()
        self._planner.coming = self.behind.missing
        if self.behind.is_over:
            self.behind = None
        return True

    @property
    def compiling(self) -> tuple[str, ...]:
        """Labels of what is being compiled behind, or will be: plans, and replays that say likeliest tokens."""
        return (*(plan.label for plan in self._planner.coming), *(() if self.behind is None else self.behind.others))

    @property
    def _everything(self) -> int:
        """More requests than there are places: they need all batches."""
        return self._device.config.max_requests + 1

    def _make_first(self, num_requests: int, needs: Needs) -> None:
        """Makes what `num_requests` at once lack to run at all."""
        if self._planner.lacks(num_requests, needs):
            self._empty()
            self._planner.prepare_first(num_requests, needs)

    def _make_all(self, batches: Sequence[int], needs: Needs) -> None:
        """Makes all plans of `batches` that are missing."""
        if self._planner.lacks_any(batches, needs):
            self._empty()
            self._planner.prepare(batches, needs)

    def _make_behind(self, batches: Sequence[int], needs: Needs, *, replays: bool = False) -> None:
        """Begins to make all plans of `batches` that are missing, while requests run."""
        self.behind = Behind(self._device, self._planner, batches, needs, replays=replays)
        self._planner.coming = self.behind.missing


class Behind:
    """Plans of some batches on their way.

    Attributes:
        missing: plans that are not tried yet, at least; at last those that are not timed yet.
        is_over: whether all have been tried and timed.
        others: labels of what else is not compiled yet.
    """

    def __init__(
        self, device: Device, planner: Planner, batches: Sequence[int], needs: Needs, *, replays: bool = False
    ) -> None:
        """Begins to compile the first; with `replays`, also compiles at last what says likeliest tokens."""
        self.is_over = False
        self.others = (REPLAYS,) if replays else ()
        self.missing: tuple[Plan, ...] = ()
        self._device = device
        self._planner = planner
        self._wanted = batches, needs
        self._pieces = self._all_pieces()
        self._not_before = 0.0
        self._begin(next(self._pieces), apart=True)

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether the next piece has been compiled, and may hold up what runs, if anything does."""
        return not self.is_over and self._compiled.done() and (is_idle or time.perf_counter() >= self._not_before)

    def go_on(self) -> None:
        """Tries what has been compiled, and begins to compile what is next; all places must be free.

        What cannot be compiled or tried is put aside, see `Planner.making`.
        """
        began = time.perf_counter()
        error = self._compiled.exception()
        try:
            plans = next(self._pieces) if error is None else self._pieces.throw(error)
        except StopIteration:
            self.is_over = True
            self.missing = self.others = ()
        else:
            self._begin(plans)
        ended = time.perf_counter()
        self._not_before = ended + (ended - began) * (1 - SHARE) / SHARE

    def _all_pieces(self) -> Generator[tuple[Plan, ...] | None, None, None]:
        yield from self._planner.making(*self._wanted, optional=True)
        if self.others:
            yield from self._planner.making_replays()

    def _begin(self, plans: tuple[Plan, ...] | None, *, apart: bool = False) -> None:
        """Begins to compile what the next piece runs; with `apart`, prefill gets a program of its own there."""
        left = self._planner.missing(*self._wanted)
        if plans is None:
            self.missing = ()
        elif left or not self._planner.failed.keys().isdisjoint(plan.label for plan in self.missing):
            self.missing = left  # else the last ones are yet to be timed
        try:
            self._compiled = (
                self._device.compile_replays() if plans is None else self._device.compile_behind(plans, apart=apart)
            )
        except Exception as error:  # there may be no room for what a draft keeps
            self._compiled = Future()
            self._compiled.set_exception(error)
