"""Signals that ask a job to stop: SIGTERM of a cluster's scheduler, SIGINT of Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BY_SIGNAL = 128  # exit codes of processes that a signal ended begin here: 130 after SIGINT, 143 after SIGTERM


class Stopped(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        """`number` is the signal's."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = BY_SIGNAL + number


class StopSignals:
    """A context manager in which the first signal raises `Stopped`, where and when the program chooses; a second one kills."""

    def __init__(self) -> None:
        """Catches nothing until it is entered."""
        self._received: int | None = None
        self._deferred = False

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> bool:
        """Whether there was one."""
        return self._received is not None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this, a signal waits for `check`; outside, it raises at once."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    def check(self) -> None:
        """Raises `Stopped` if there was a signal."""
        if self._received is not None:
            raise Stopped(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not self._deferred:
            self.check()
