"""Drives an engine with requests from anywhere: two rounds of places in flight, so that a place which gets free is filled."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from detspec.engine.request import Request, Update

ROUNDS = 2
IDLE_S = 1e-4  # between two looks at an iterator while nothing is in flight


def drive(
    engine: Any, requests: Iterable[Request | None], *, stream: bool = False, outbox: deque[Update] | None = None
) -> Iterator[list[Update]]:
    """Yields the updates of one step of `engine` after another, until all `requests` have ended.

    It asks `requests` for more as places get free, so they may have no end. None stands for nothing at the moment: what is in
    flight goes on. An iterator that waits instead holds up the thread that drives the engine.

    `stream` and `outbox` are those of `Engine.add`: with an outbox of its own it sees its own updates alone.
    """
    source: Iterator[Request | None] | None = iter(requests)
    num_open = 0
    while True:
        while source is not None and num_open < ROUNDS * engine.num_places:
            try:
                request = next(source)
            except StopIteration:
                source = None
                break
            if request is None:
                break
            engine.add(request, stream=stream, outbox=outbox)
            num_open += request.sampling.n
        if source is None and not num_open:
            return
        updates = engine.step(outbox)
        num_open -= sum(update.completion is not None for update in updates)
        if not updates and not num_open:
            time.sleep(IDLE_S)
        yield updates
