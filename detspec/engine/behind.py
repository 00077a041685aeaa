"""Makes further plans while requests run: compiles in another thread, and tries what is compiled between two segments.

A trial needs all places, so requests stand still and catch up afterwards. It takes tenths of a second, compiling takes many.
Where nothing is in flight it comes at once, else so rarely that trials take a tenth of the time.
"""

import time
from collections.abc import Sequence

from detspec.engine.device import Device
from detspec.engine.planner import Planner
from detspec.engine.policy import Needs, Plan

SHARE = 0.1  # of the time that trials take while requests run


class Behind:
    """Plans of some batches on their way.

    Attributes:
        missing: plans that are not tried yet, at least; at last those that are not timed yet.
        is_over: whether all have been tried and timed.
    """

    def __init__(self, device: Device, planner: Planner, batches: Sequence[int], needs: Needs) -> None:
        """Begins to compile the first."""
        self.is_over = False
        self.missing: tuple[Plan, ...] = ()
        self._device = device
        self._planner = planner
        self._wanted = batches, needs
        self._making = planner.making(batches, needs)
        self._not_before = 0.0
        self._begin_next()

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether the next piece has been compiled, and may hold up what runs, if anything does."""
        return not self.is_over and self._compiled.done() and (is_idle or time.perf_counter() >= self._not_before)

    def go_on(self) -> None:
        """Tries what has been compiled, and begins to compile what is next; all places must be free.

        Raises what compiling raised, and as `Planner.making`.
        """
        began = time.perf_counter()
        self._compiled.result()
        self._begin_next()
        ended = time.perf_counter()
        self._not_before = ended + (ended - began) * (1 - SHARE) / SHARE

    def _begin_next(self) -> None:
        plans: tuple[Plan, ...] | None = next(self._making, None)
        self.is_over = plans is None
        if plans is None:
            self.missing = ()
        elif left := self._planner.missing(*self._wanted):
            self.missing = left  # else the last ones are yet to be timed
        self._compiled = self._device.compile_behind(plans or ())
