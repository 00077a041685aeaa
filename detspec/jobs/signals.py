"""Signals that ask a job to stop: SIGTERM from a cluster's scheduler, SIGINT from Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BY_SIGNAL = 128  # added to the signal's number in exit codes: 130 after SIGINT, 143 after SIGTERM


class Stopped(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = BY_SIGNAL + number


class StopSignals:
    """A context manager in which the first signal raises `Stopped`, at a point the program chooses. A second signal kills."""

    def __init__(self) -> None:
        self._received = 0  # 0 for none
        self._deferred = False

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> int:
        """The number of the signal that has arrived, 0 for none."""
        return self._received

    def take(self, number: int) -> None:
        """Goes on as if signal `number` had arrived, unless it is 0 or another one has."""
        self._received = self._received or number

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside this block a signal waits for `check`; outside, it raises at once."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    def check(self) -> None:
        """Raises `Stopped` if a signal has arrived."""
        if self._received:
            raise Stopped(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not self._deferred:
            self.check()
