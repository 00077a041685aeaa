"""Ends a process that waits in vain for the others: alive, but stuck, it would keep all chips for ever."""

import faulthandler
import os
import sys
import threading
import time

from detspec.engine.compiled import PROGRAMS
from detspec.errors import InputError

VARIABLE = "DETSPEC_WATCHDOG_S"  # how many seconds a process waits for the others at least
LEAST_S = 120.0
PATIENCE = 50  # may a segment take as many times the predicted seconds
EXIT_CODE = 75  # a temporary failure in sysexits.h: the same command may succeed


class Watchdog:
    """A thread that ends the process if what is expected does not come in time; time spent on compiling does not count."""

    def __init__(self, name: str, least_s: float | None = None) -> None:
        """`name` says in messages which process this is. `least_s` is by default that of DETSPEC_WATCHDOG_S, or 120."""
        self._name = name
        self._least_s = _least_s() if least_s is None else least_s
        self._allowed_s = 0.0
        self._since: float | None = None  # None while nothing is expected
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def expect(self, seconds: float) -> None:
        """From now on something is expected that was predicted to take `seconds`."""
        predicted = seconds if seconds < float("inf") else 0.0
        self._allowed_s = max(self._least_s, PATIENCE * predicted)
        self._since = time.monotonic()

    def rest(self) -> None:
        """Expects nothing from now on."""
        self._since = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._least_s / 4))
            since = self._since
            if since is None:
                continue
            if PROGRAMS.is_compiling:
                self._since = time.monotonic()
            elif time.monotonic() - since > self._allowed_s:
                self._end()

    def _end(self) -> None:
        print(
            f"detspec: {self._name}: nothing came from the device for {self._allowed_s:g} s, so another process is stuck or "
            f"gone. This one ends with exit code {EXIT_CODE}; start all of them again, and they resume. If that was too early, "
            f"raise {VARIABLE}. All threads are at:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        os._exit(EXIT_CODE)


def _least_s() -> float:
    """The seconds that DETSPEC_WATCHDOG_S gives, or the default."""
    value = os.environ.get(VARIABLE)
    try:
        seconds = LEAST_S if value is None else float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"{VARIABLE} must be a number of seconds above 0, got {value!r}")
    return seconds
