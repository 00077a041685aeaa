"""Generates the requests of a job until they are done or a signal arrives, and measures the speed."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from detspec.engine.engine_group import AnyEngine
from detspec.engine.policy import Needs
from detspec.engine.request import Completion, Request, Stats, Update
from detspec.jobs.signals import StopSignals
from detspec.progress import Progress

KeepFn = Callable[[int, Request, Completion], None]  # takes a completion, with its request and that one's number


def generate(
    engine: AnyEngine,
    todo: Iterator[tuple[int, Request]],  # requests with their numbers
    num_todo: int,  # number of completions they produce
    keep: KeepFn,
    progress: Progress,
    signals: StopSignals,
    *,
    needs: Needs,  # what all of `todo` together need of programs
) -> dict[str, Any]:
    """Calls `keep(number, request, completion)` for each completion; returns statistics.

    Raises `Stopped` if a signal arrived, here or at a process that shares the mesh, after the running segment and its
    completions.
    """
    began = time.perf_counter()
    if num_todo:
        progress.stage("compiling and certifying")
        engine.prepare(num_todo, needs, first_only=True)
    prepared = time.perf_counter()
    progress.stage("generating")
    run = _Run(engine, todo, keep, progress)
    with signals.deferred():
        try:
            while run.fill() and not engine.agreement.stops(signals.received):
                num_tokens = engine.num_tokens
                run.take(engine.step())
                progress.segment(engine.num_tokens - num_tokens, engine.num_live)
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

    def __init__(self, engine: AnyEngine, todo: Iterator[tuple[int, Request]], keep: KeepFn, progress: Progress) -> None:
        self.num_tokens = 0
        self.counters = Stats()
        self._engine = engine
        self._todo = todo
        self._keep = keep
        self._progress = progress
        self._in_flight: dict[str, list[Any]] = {}  # id: number, request, completions to come
        self._num_open = 0

    def fill(self) -> bool:
        """Adds requests up to a round of places more than there are; whether any are in flight."""
        while self._num_open < 2 * self._engine.num_places and (following := next(self._todo, None)):
            number, request = following
            self._in_flight[request.id] = [number, request, request.sampling.n]
            self._num_open += request.sampling.n
            self._engine.add(request)
        return self._num_open > 0

    def take(self, updates: Sequence[Update]) -> None:
        """Keeps the completions among `updates`."""
        for completion in (update.completion for update in updates if update.completion is not None):
            entry = self._in_flight[completion.id]
            self._keep(entry[0], entry[1], completion)
            entry[2] -= 1
            if not entry[2]:
                del self._in_flight[completion.id]
            self._num_open -= 1
            self.num_tokens += len(completion.token_ids)
            self.counters += completion.stats
            self._progress.finished(acceptance=self.counters.draft_acceptance_rate)
