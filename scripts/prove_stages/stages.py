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
    """A process, or several.

    Attributes:
        name: as tables call it.
        modules: its modules in this package, one after the other.
        proves: what its figures say.
        share_s: seconds of about eleven minutes that it may take; other totals are shared out in proportion.
        platforms: where it applies.
        packages: packages that it needs besides those of all stages; where one is not installed, it does not apply.
        environment: variables of its process.
        compiles_first: all its programs are compiled at the same time, before the first of them runs.
        at_once: how many seconds of tracing and compiling in a plan an H200's host of 16 cores does in one: 14 passes of 133 s
            took it 39 s, and the doctor's 18 of 219 s took it 51 s.
        gate: measured anew in each run, whose machine may be another one; the run ends if its process dies.
        processes: how many of them measure it, one after the other.
        own_cache: it finds nothing that other processes compiled, which may have tuned their programs in other ways.
        run_s: seconds that it is expected to take on an H200 besides compiling and the work itself: starting, making weights,
            copying to the host. Estimated from what stages took there.
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
    processes: int = 1


PEER: dict[str, Any] = {
    "platforms": ("cpu", "gpu"),
    "packages": ("torch",),
    "environment": (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),),  # torch needs the memory that jax would take at its start
}
TWICE: dict[str, Any] = {"own_cache": True, "processes": 2}
AHEAD: dict[str, Any] = {"compiles_first": True, "at_once": 4}
STAGES = (
    Stage("environment", ("environment",), "the machine, its compilers, and one kernel", 10, 5, gate=True),
    Stage("ceilings", ("ceilings",), "what the device can do at best", 10, 3, gate=True),
    Stage("kernels", ("kernels",), "kernels are right, whatever unused memory holds", 43, 17),
    Stage("attention", ("decode", "attention"), "decode attention against a copy, passes by themselves", 27, 8),
    Stage("products", ("products",), "pinned and int8 products, and the library's", 80, 35),
    Stage("experts", ("experts",), "products with the weights of experts: values, bits, time", 40, 20),
    Stage("integers", ("integers",), "integer models have the definition's bits, and what they cost", 60, 25, **AHEAD),
    Stage("passes", ("passes",), "a canonical pass costs little more than a step", 75, 15, **AHEAD),
    Stage("doctor again", ("anchor",), "two processes have the same bits", 60, 22, **AHEAD, **TWICE),
    Stage("whole", ("whole",), "the same at the model's full depth", 55, 25, **AHEAD),
    Stage("breakdown", ("breakdown",), "what a step's time goes into, kernel by kernel", 80, 35, ("gpu",)),
    Stage("completions", ("completions",), "one prompt, a thousand times, one result", 45, 24, at_once=4),
    Stage("generation", ("generation",), "determinism costs little, end to end", 90, 50, at_once=4),
    Stage("vendor", ("vendor",), "attention against the vendor's", 22, 8),
    Stage("peer", ("peer",), "PyTorch in CUDA graphs, for comparison", 13, 10, **PEER),
    Stage("doctor", ("examine",), "which rows and splits have equal bits, and all that must not matter", 70, 15, **AHEAD),
)


def stage_of(name: str) -> Stage:
    """The stage called `name`."""
    return {stage.name: stage for stage in STAGES}[name]
