"""Times several cases in turn within one process, so that other load on the machine meets all alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# `prepare()` makes the arguments, untimed, and returns the call that is timed
Prepare = Callable[[], Callable[[], Any]]


def time_by_turns(cases: Mapping[str, Prepare], repeats: int) -> dict[str, list[float]]:
    """Seconds of each of `cases` in each of `repeats` rounds, until its result is ready; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, prepare in cases.items():
            call = prepare()
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds
