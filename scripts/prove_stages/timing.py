"""Times of calls that have warmed up. Calls that are compared take turns, and their ratios are of one round each."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax

from prove_stages.sizes import Size

Call = Callable[[], Any]
MOST_CALLS = 1000  # of one sample


def sample(call: Call, number: int) -> float:
    """Mean seconds of `number` queued calls."""
    began = time.perf_counter()
    for _ in range(number):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / number


def in_turns(calls: Mapping[str, Call], size: Size) -> dict[str, list[float]]:
    """Seconds of each call, once a round."""
    numbers = {}
    for name, call in calls.items():
        jax.block_until_ready(call())  # compiles
        numbers[name] = min(MOST_CALLS, max(1, int(size.sample_s / sample(call, 1))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(size.repeats):
        for name, call in calls.items():
            samples[name].append(sample(call, numbers[name]))
    return samples


def ratio(samples: Mapping[str, list[float]], other: str, own: str) -> float:
    """The median over rounds of the time of `other` over that of `own`: above 1 the own one is faster."""
    return median(b / a for a, b in zip(samples[own], samples[other], strict=True))


def typical(samples: Mapping[str, list[float]], name: str) -> float:
    """The median time of one call."""
    return median(samples[name])
