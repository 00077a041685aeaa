"""The measurements behind the panels in order; `perform` takes one."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from scripts.replications.llm42.grid import speeds
from scripts.replications.llm42.one_request import one_request
from scripts.replications.llm42.online import latencies
from scripts.replications.llm42.passes import pass_times
from scripts.replications.llm42.products import product_times
from scripts.replications.llm42.recompute import recomputed
from scripts.replications.llm42.repeats import repeated
from scripts.replications.llm42.shares import throughput
from scripts.replications.llm42.spans import spans
from scripts.replications.pool import Run, keep_result

SIZES = ("full", "tiny")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """`function(**settings)`; `tiny` holds the settings that differ in a trial."""

    function: Callable[..., dict[str, Any]]
    settings: dict[str, Any]
    tiny: dict[str, Any]

    def of_size(self, size: str) -> dict[str, Any]:
        """The settings of a size, one of `SIZES`."""
        return {**self.settings, **(self.tiny if size == "tiny" else {})}


# 4 of 12 layers where whole engines run: 50 M weights, and programs that compile in seconds
SMALL = {"shape": ("random_100m", 4)}
TINY = {"shape": ("tiny_python", 1)}

MEASUREMENTS = {
    "passes": Measurement(
        pass_times,
        {"shape": ("random_100m", 12), "rows": (1, 4, 16, 32, 64, 128, 256), "context": 256, "repeats": 15},
        {**TINY, "rows": (4, 16, 32), "context": 16, "repeats": 1},
    ),
    "products": Measurement(
        product_times,
        {"shape": ("random_100m", 12), "rows": (1, 8, 32, 128, 512), "norm_rows": 256, "repeats": 9},
        {**TINY, "rows": (1, 8), "norm_rows": 8, "repeats": 1},
    ),
    "one_request": Measurement(
        one_request,
        {**SMALL, "batch": 8, "lengths": (32, 96), "repeats": 7},
        {**TINY, "batch": 1, "lengths": (16, 16), "repeats": 1},
    ),
    "spans": Measurement(
        spans,
        {**SMALL, "requests": 32, "in_flight": 16, "prompt_lens": (8, 64), "new": 160, "gap": 14.0},
        {**TINY, "requests": 3, "in_flight": 2, "prompt_lens": (4, 16), "new": 16, "gap": 1.0},
    ),
    "recompute": Measurement(
        recomputed,
        {**SMALL, "batch": 8, "lengths": (32, 128), "windows": (4, 8, 16, 32, 64)},
        {**TINY, "batch": 2, "lengths": (16, 16), "windows": (4,)},
    ),
    "throughput": Measurement(
        throughput,
        {
            **SMALL,
            "in_flight": 16,
            "requests": 32,
            "workloads": ("ShareGPT", "ArXiv", "1K/256", "1K/1K", "4K/1K", "4K/4K"),
            "shares": (10, 50, 100),
            "scale": 1.0,
            "least": (3, 4.0),
        },
        {**TINY, "in_flight": 2, "requests": 4, "workloads": ("ShareGPT", "1K/1K"), "scale": 0.0625, "least": (1, 0.0)},
    ),
    "online": Measurement(
        latencies,
        {
            **SMALL,
            "in_flight": 16,
            "requests": 128,
            "loads": (0.5, 0.7, 0.9),
            "shares": (10, 50, 100),
            "scale": 1.0,
            "repeats": 3,
        },
        {**TINY, "in_flight": 2, "requests": 8, "scale": 0.0625, "repeats": 1},
    ),
    "speeds": Measurement(
        speeds,
        {
            **SMALL,
            "batch": 16,
            "lengths": (32, 64),
            "windows": (4, 8, 16, 32),
            "groups": (1, 2, 4, 8, 16),
            "max_rows": 64,
            "repeats": 2,
        },
        {**TINY, "batch": 2, "lengths": (16, 16), "windows": (4,), "groups": (1, 2), "max_rows": 8, "repeats": 1},
    ),
    "repeats": Measurement(
        repeated,
        {**SMALL, "in_flight": 16, "prompt_len": 24, "new": 48, "times": 1000, "control_times": 200},
        {**TINY, "in_flight": 2, "prompt_len": 15, "new": 8, "times": 8, "control_times": 4},
    ),
}


def all_runs(only: Sequence[str] = ()) -> list[Run]:
    """The measurements as runs, each alone on all cores; `only` selects some, `InputError` for an unknown name."""
    if unknown := sorted(set(only) - set(MEASUREMENTS)):
        raise InputError(f"no measurement {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    return [Run(name, alone=True, one_thread=False) for name in MEASUREMENTS if name in only or not only]


def perform(name: str, *, workdir: Path, size: str) -> None:
    """Takes the measurement called `name` in this process and leaves its result in `workdir/NAME`."""
    one = MEASUREMENTS[name]
    settings = one.of_size(size)
    keep_result(workdir / name, name, lambda: {"settings": settings, **one.function(**settings)})
