"""Generates the requests of a job until they are done or a signal arrives, and measures the speed."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from detspec.engine.engine import Engine
from detspec.engine.request import Completion, Request, Stats
from detspec.jobs.signals import StopSignals
from detspec.progress import Progress


def generate(
    engine: Engine,
    todo: Iterator[tuple[int, Request]],
    num_todo: int,
    keep: Callable[[int, Request, Completion], None],
    progress: Progress,
    signals: StopSignals,
    *,
    deterministic: bool,
) -> dict[str, Any]:
    """Calls `keep(number, request, completion)` for each completion; returns statistics.

    Args:
        engine: generates.
        todo: requests with their numbers.
        num_todo: number of completions they produce.
        keep: stores a completion.
        progress: shows what is done.
        signals: a signal ends the run early.
        deterministic: whether any of `todo` is deterministic.

    Raises:
        Stopped: a signal arrived; raised after the running segment and its completions.
    """
    running: dict[str, list[Any]] = {}  # id: number, request, samples not yet complete
    num_tokens = 0
    counters = Stats()

    def waiting() -> Iterator[Request]:
        for number, request in todo:
            if signals.received:
                return
            running[request.id] = [number, request, request.sampling.n]
            yield request

    def on_segment(tokens: int, num_live: int) -> None:
        progress.segment(tokens, num_live)
        if signals.received:
            engine.stop()

    began = time.perf_counter()
    if num_todo:
        progress.stage("compiling and certifying")
        engine.prepare(num_todo, deterministic=deterministic)
    prepared = time.perf_counter()
    progress.stage("generating")
    with signals.deferred():
        few = num_todo <= engine.config.max_requests  # the engine sees from a list that all requests are known
        requests = list(waiting()) if few else waiting()
        for completion in engine.run(requests, deterministic=deterministic, on_segment=on_segment) if num_todo else ():
            number, request, _ = running[completion.id]
            keep(number, request, completion)
            running[completion.id][2] -= 1
            if not running[completion.id][2]:
                del running[completion.id]
            num_tokens += len(completion.token_ids)
            counters += completion.stats
            progress.finished(acceptance=counters.draft_acceptance_rate)
    generate_s = time.perf_counter() - prepared
    return {
        "num_tokens": num_tokens,
        "compile_s": round(prepared - began, 3),
        "generate_s": round(generate_s, 3),
        "tok_per_s": round(num_tokens / generate_s, 1),
        "mean_acceptance_length": counters.mean_acceptance_length,
        "draft_acceptance_rate": counters.draft_acceptance_rate,
        **dataclasses.asdict(counters),
        "plans": {
            plan.label: {"certified": certificate.equal, "differs": certificate.differs, "step_ms": certificate.step_s * 1e3}
            for plan, certificate in engine.certificates.items()
            if certificate.step_s < float("inf")
        },
    }
