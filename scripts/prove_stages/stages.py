"""The stages in the order in which they run: the most valuable first."""

import dataclasses
from typing import Any

DONE = "done"
SOME_FAILED = "some failed"
FAILED = "failed"
CUT_OFF = "cut off"
NOT_HERE = "does not apply"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: as tables call it.
        modules: its modules in this package, one after the other.
        proves: what its figures say.
        share_s: seconds of nine minutes that it may take; other totals are shared out in proportion.
        platforms: where it applies.
        environment: variables of its process; flags are added to those that are set.
        compiles_first: all its programs are compiled at the same time, before the first of them runs.
        at_once: programs that 16 cores are assumed to compile for it at the same time, in plans.
        own_cache: it finds nothing that other processes compiled, which may have tuned their programs in other ways.
        run_s: seconds that it is expected to take on an H200 besides compiling and the work itself: starting, making weights,
            copying to the host. Estimated.
    """

    name: str
    modules: tuple[str, ...]
    proves: str
    share_s: int
    run_s: float
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    environment: tuple[tuple[str, str], ...] = ()
    compiles_first: bool = False
    own_cache: bool = False
    at_once: int = 1


UNTUNED: dict[str, Any] = {"platforms": ("gpu",), "environment": (("XLA_FLAGS", "--xla_gpu_autotune_level=0"),)}
ALONE: dict[str, Any] = {"own_cache": True}
AHEAD: dict[str, Any] = {"compiles_first": True, "at_once": 8}
STAGES = (
    Stage("ceilings", ("ceilings",), "what the device can do at best", 13, 8),
    Stage("kernels", ("kernels",), "kernels are right, whatever unused memory holds", 36, 15),
    Stage("doctor", ("examine",), "which budgets and splits have equal bits", 70, 20, **AHEAD, **ALONE),
    Stage("passes", ("passes", "whole"), "a canonical pass costs little more than a step", 62, 15, **AHEAD),
    Stage("generation", ("generation",), "determinism costs little, end to end", 140, 25, at_once=8),
    Stage("completions", ("completions",), "one prompt, a thousand times, one result", 68, 15, at_once=8),
    Stage("attention", ("decode", "attention"), "attention against a copy and the vendor's", 55, 15),
    Stage("products", ("products",), "pinned and int8 products, and the library's", 27, 10),
    Stage("doctor untuned", ("untuned",), "the same without autotuning", 40, 15, **UNTUNED, **AHEAD, **ALONE),
    Stage("doctor again", ("anchor",), "another process has the same bits", 26, 12, **ALONE),
)


def stage_of(name: str) -> Stage:
    """The stage called `name`."""
    return {stage.name: stage for stage in STAGES}[name]
