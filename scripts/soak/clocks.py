"""Clocks that jump, forwards and back, in the place of the right ones."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator

CLOCKS = ("time", "monotonic", "perf_counter")
JUMPS = 0.05  # share of the looks before which a clock jumps
FARTHEST_S = 3600.0


@contextlib.contextmanager
def wrong_clocks(seed: int | None) -> Iterator[None]:
    """In this context the clocks of the module `time` jump by up to an hour either way; with None they stay right."""
    right = {name: getattr(time, name) for name in CLOCKS}
    rng = random.Random(seed)
    try:
        for name, clock in right.items() if seed is not None else ():
            setattr(time, name, jumping(clock, rng))
        yield
    finally:
        for name, clock in right.items():
            setattr(time, name, clock)


def jumping(clock: Callable[[], float], rng: random.Random) -> Callable[[], float]:
    """`clock`, set to another time before one look in twenty."""
    ahead_s = 0.0

    def look() -> float:
        nonlocal ahead_s
        if rng.random() < JUMPS:
            ahead_s = rng.uniform(-FARTHEST_S, FARTHEST_S)
        return clock() + ahead_s

    return look
