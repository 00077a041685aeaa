"""How long the device worked, and how long it waited for the host."""

import time


class Clock:
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
        """Nothing is in flight: time until the next work is not counted."""
        self.free()
        self._since = None
