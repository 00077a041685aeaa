"""The stages in the order in which they run: the most valuable first."""

import dataclasses
from typing import Any

DONE = "done"
SOME_FAILED = "some failed"
FAILED = "failed"
CUT_OFF = "cut off"
UNUSABLE = "unusable"  # nothing can be measured: on this device, with these switches, or into this folder
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
        packages: packages that it needs besides those of all stages; where one is not installed, it does not apply.
        environment: variables of its process.
        compiles_first: all its programs are compiled at the same time, before the first of them runs.
        at_once: programs that 16 cores are assumed to compile for it at the same time, in plans.
        gate: measured anew in each run, which ends if its process dies.
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
    packages: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    compiles_first: bool = False
    own_cache: bool = False
    gate: bool = False
    at_once: int = 1


PEER: dict[str, Any] = {
    "platforms": ("cpu", "gpu"),
    "packages": ("torch",),
    "environment": (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),),  # torch needs the memory that jax would take at its start
}
ALONE: dict[str, Any] = {"own_cache": True}
AHEAD: dict[str, Any] = {"compiles_first": True, "at_once": 8}
STAGES = (
    Stage("environment", ("environment",), "the machine, its compilers, and one kernel", 15, 8, gate=True),
    Stage("ceilings", ("ceilings",), "what the device can do at best", 20, 8),
    Stage("kernels", ("kernels",), "kernels are right, whatever unused memory holds", 40, 20),
    Stage("attention", ("decode", "attention"), "decode attention against a copy, passes by themselves", 25, 10),
    Stage("products", ("products",), "pinned and int8 products, and the library's", 33, 15),
    Stage("passes", ("passes", "whole"), "a canonical pass costs little more than a step", 100, 25, **AHEAD),
    Stage("completions", ("completions",), "one prompt, a thousand times, one result", 45, 15, at_once=8),
    Stage("generation", ("generation",), "determinism costs little, end to end", 85, 35, at_once=8),
    Stage("doctor again", ("anchor",), "two processes have the same bits", 65, 25, **AHEAD, **ALONE),
    Stage("peer", ("peer",), "PyTorch in CUDA graphs, for comparison", 12, 10, **PEER),
    Stage("breakdown", ("breakdown",), "what a step's time goes into, kernel by kernel", 25, 10, ("gpu",)),
    Stage("vendor", ("vendor",), "attention against the vendor's", 15, 5),
    Stage(
        "doctor", ("examine",), "which rows and splits have equal bits, and all that must not matter", 60, 20, **AHEAD, **ALONE
    ),
)


def stage_of(name: str) -> Stage:
    """The stage called `name`."""
    return {stage.name: stage for stage in STAGES}[name]
