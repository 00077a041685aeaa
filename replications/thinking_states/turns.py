"""Timing several things by turns within one process, so that what the machine does beside them meets all alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# () -> what is timed: `prepare()` makes its arguments outside the clock
Prepare = Callable[[], Callable[[], Any]]


def time_by_turns(cases: Mapping[str, Prepare], repeats: int) -> dict[str, list[float]]:
    """Seconds of each of `cases` in each of `repeats` rounds, until what it returns is there; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, prepare in cases.items():
            call = prepare()
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds
