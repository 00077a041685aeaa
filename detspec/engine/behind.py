"""Makes further plans while requests run: compiles in another thread, and tries what is compiled between two segments.

A trial needs all places, so requests stand still and catch up afterwards. It takes tenths of a second, compiling takes many.
Where nothing is in flight it comes at once, else so rarely that trials take a tenth of the time.
"""

import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future

from detspec.engine.device import Device
from detspec.engine.planner import REPLAYS, Planner
from detspec.engine.policy import Needs, Plan

SHARE = 0.1  # of the time that trials take while requests run


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
