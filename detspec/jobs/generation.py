"""Generates the requests of a job until they are done or a signal asks it to stop, and measures the speed.

Such signals are SIGTERM, from a cluster's scheduler, and SIGINT, from Ctrl-C.
"""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from detspec.engine.engine import Engine, drive
from detspec.engine.policy import Needs
from detspec.engine.request import GIVEN, Request, Update
from detspec.jobs.lines import CheckedLine, LineFormat, Output
from detspec.progress import Progress
from detspec.riders.counters import Stats

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BY_SIGNAL = 128  # added to the signal's number in exit codes: 130 after SIGINT, 143 after SIGTERM

KeepFn = Callable[[int, Output], None]  # takes a line of output, with the number of the line of input


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


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lines that a job has to generate.

    Attributes:
        lines: lines of input, one at a time; None for nothing at the moment, while more may come.
        reader: format of the lines.
        num_completions: how many completions they produce, or more.
        needs: programs that they need together.
        is_over: whether what is in flight is not wanted any more, and no line will come.
    """

    lines: Iterator[CheckedLine | None]
    reader: LineFormat
    num_completions: int
    needs: Needs
    is_over: Callable[[], bool] = lambda: False


def generate(engine: Engine, work: Workload, keep: KeepFn, progress: Progress, signals: StopSignals) -> dict[str, Any]:
    """Calls `keep(number, output)`, which counts it on `progress`, for each line of output as it is finished.

    Returns statistics. Raises `Stopped` if a signal arrived, here or at a process that shares the mesh, after the running
    segment and its completions.
    """
    began = time.perf_counter()
    if work.num_completions:
        progress.stage("compiling and certifying", at_once=True)
        engine.prepare(work.num_completions, work.needs, first_only=True)
    prepared = time.perf_counter()
    progress.stage("generating", at_once=True)
    run = _InFlight(work, keep)
    with signals.deferred():
        try:
            num_tokens = engine.num_tokens
            for updates in drive(engine, run.requests()):
                run.take(updates)
                acceptance = run.counters.draft_acceptance_rate if run.counters.num_draft_tokens else None
                progress.segment(engine.num_tokens - num_tokens, engine.num_live, acceptance=acceptance)
                num_tokens = engine.num_tokens
                if work.is_over() or engine.agreement.stops(signals.received):
                    break
        finally:
            updates = engine.stop()  # requests on the device end, the others are dropped
        run.take(updates)
        signals.take(engine.agreement.ended(signals.received))
    generate_s = time.perf_counter() - prepared
    return {
        "num_tokens": run.num_tokens,
        "compile_s": round(prepared - began, 3),
        "generate_s": round(generate_s, 3),
        "tok_per_s": round(run.num_tokens / generate_s, 1),
        "mean_acceptance_length": run.counters.mean_acceptance_length,
        "draft_acceptance_rate": run.counters.draft_acceptance_rate,
        **dataclasses.asdict(run.counters),
        "acceptance_by_match_length": engine.acceptance_by_match_length,
        "plans": {
            plan.label: {"status": certificate.status, "why": certificate.why, "step_ms": step_s * 1e3}
            for plan, certificate in engine.certificates.items()
            if math.isfinite(step_s := engine.replicas[0].planner.step_times.known(plan))
        },
    }


class _InFlight:
    """Lines in flight, and what came of them so far."""

    def __init__(self, work: Workload, keep: KeepFn) -> None:
        self.num_tokens = 0
        self.counters = Stats()
        self._work = work
        self._keep = keep
        self._in_flight: dict[str, list[Any]] = {}  # by id of a request: line, completions to write, completions to come

    def requests(self) -> Iterator[Request | None]:
        """Requests of one line after the other, None for nothing at the moment; answers lines without requests."""
        for asked in self._work.lines:
            if asked is None:
                yield None
            elif asked.requests:
                there: list[Any] = []
                self._in_flight |= {request.id: [asked, there, request.sampling.n] for request in asked.requests}
                yield from asked.requests
            else:
                self._write(asked, [])

    def take(self, updates: Sequence[Update]) -> None:
        """Keeps the completions among `updates`."""
        for completion in (update.completion for update in updates if update.completion is not None):
            entry = self._in_flight[completion.id]
            asked, there, _ = entry
            entry[2] -= 1
            if not entry[2]:
                del self._in_flight[completion.id]
            self.num_tokens += 0 if completion.finish_reason == GIVEN else len(completion.token_ids)
            self.counters += completion.stats
            there.append(completion)
            if self._write(asked, there):
                there.clear()

    def _write(self, asked: CheckedLine, there: Sequence[Any]) -> bool:
        """Keeps the lines of output that are there; whether any is."""
        outputs = self._work.reader.outputs(asked, there)
        for output in outputs:
            self._keep(asked.number, output)
        return bool(outputs)
