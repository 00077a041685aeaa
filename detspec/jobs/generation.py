"""Generates the requests of a job until they are done or a signal arrives, and measures the speed."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from detspec.engine.engine_group import AnyEngine
from detspec.engine.policy import Needs
from detspec.engine.request import GIVEN, Stats, Update
from detspec.jobs.asked import Asked, Output
from detspec.jobs.signals import StopSignals
from detspec.progress import Progress

KeepFn = Callable[[int, Output], None]  # takes a line of output, with the number of the line of input


def _never() -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class Work:
    """What a job has to generate.

    Attributes:
        lines: lines of input, one at a time; None for nothing at the moment, while more may come.
        num_completions: how many completions they produce, or more.
        needs: what they together need of programs.
        is_over: whether what is in flight is not wanted any more, and no line will come.
    """

    lines: Iterator[Asked | None]
    num_completions: int
    needs: Needs
    is_over: Callable[[], bool] = _never


def generate(engine: AnyEngine, work: Work, keep: KeepFn, progress: Progress, signals: StopSignals) -> dict[str, Any]:
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
    run = _Run(engine, work.lines, keep)
    with signals.deferred():
        try:
            while run.fill() and not work.is_over() and not engine.agreement.stops(signals.received):
                num_tokens = engine.num_tokens
                run.take(engine.step())
                acceptance = run.counters.draft_acceptance_rate if run.counters.num_draft_tokens else None
                progress.segment(engine.num_tokens - num_tokens, engine.num_live, acceptance=acceptance)
        finally:
            updates = engine.stop()  # what is on the device ends, the rest is dropped
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
            if math.isfinite(step_s := engine.planner.step_times.known(plan))
        },
    }


class _Run:
    """What a job has in flight, and what came of it so far."""

    def __init__(self, engine: AnyEngine, lines: Iterator[Asked | None], keep: KeepFn) -> None:
        self.num_tokens = 0
        self.counters = Stats()
        self._engine = engine
        self._lines: Iterator[Asked | None] | None = lines  # None after the last one
        self._keep = keep
        self._in_flight: dict[str, list[Any]] = {}  # id: line, completions to come
        self._num_open = 0

    def fill(self) -> bool:
        """Adds requests up to a round of places more than there are; whether any are in flight, or may come."""
        while self._lines is not None and self._num_open < 2 * self._engine.num_places:
            try:
                asked = next(self._lines)
            except StopIteration:
                self._lines = None
                break
            if asked is None:
                break
            for request in asked.requests:
                self._in_flight[request.id] = [asked, request.sampling.n]
                self._num_open += request.sampling.n
                self._engine.add(request)
            self._write(asked, asked.ready())
        return self._num_open > 0 or self._lines is not None

    def take(self, updates: Sequence[Update]) -> None:
        """Keeps the completions among `updates`."""
        for completion in (update.completion for update in updates if update.completion is not None):
            entry = self._in_flight[completion.id]
            entry[1] -= 1
            if not entry[1]:
                del self._in_flight[completion.id]
            self._num_open -= 1
            self.num_tokens += 0 if completion.finish_reason == GIVEN else len(completion.token_ids)
            self.counters += completion.stats
            self._write(entry[0], entry[0].take(completion))

    def _write(self, asked: Asked, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._keep(asked.number, output)
