"""The runs of the replication in order: trainings, then measurements on the exported models; `perform` executes one."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from detspec.checkpoint.load import Model, load
from detspec.errors import InputError
from detspec.train.run import read_log, run_experiment
from scripts.replications.pool import Run, keep_result
from scripts.replications.thinking_states.answer_time import answer_times
from scripts.replications.thinking_states.curriculum import CurriculumConfig
from scripts.replications.thinking_states.forced import forced_flips
from scripts.replications.thinking_states.prefill import prefill_times, rounds_by_sparsity
from scripts.replications.thinking_states.runs import CHUNKS, LOOPS, QUICK, get_config, starts_from, trainings
from scripts.replications.thinking_states.speeds import answer_speeds
from scripts.replications.thinking_states.step_time import step_times

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "scripts/replications/thinking_states/config.py"
# A trial trains one run of each kind, and measures these instead of all others.
QUICK_TRAININGS = (
    *("parity-thinking-0", "parity-cot-0", "parity-coconut-0", "parity-icot-0", "two_hop-facts-0", "known-thinking-0"),
    *("arithmetic-thinking-0", "arithmetic-cot-0", "known-cot-0", "loop-1"),
)
LAST_STEPS = 20  # whose mean loss is reported


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measurement: `function(*models, **settings)`; `quick` holds the settings that differ in a trial."""

    function: Callable[..., Any]
    models: tuple[str, ...]
    settings: dict[str, Any]
    quick: dict[str, Any]
    alone: bool


def steps(model: Model, **settings: Any) -> list[dict[str, Any]]:
    """Step times of models of this shape; the weights do not matter."""
    return step_times(model.cfg, **settings)


# Models of arithmetic whose speeds are compared, with their arms.
COMPARED = {
    "arithmetic-cot-0": "cot",
    "arithmetic-no_cot-0": "no_cot",
    "arithmetic-thinking-0": "thinking",
    **{f"chunk-{chunk}": "thinking" for chunk in CHUNKS},
}
# And of two hops with known facts.
LOOPED = {"known-cot-0": "cot", **{f"loop-{layers}": "thinking" for layers in LOOPS}}
MEASUREMENTS = {
    "forced": Measurement(
        forced_flips,
        ("parity-thinking-0",),
        {"num_ops": (10, 20), "num_problems": 128, "seed": 1},
        {"num_ops": (2,), "num_problems": 2},
        alone=False,
    ),
    "rounds": Measurement(
        rounds_by_sparsity,
        ("sparse",),
        {"fillers": (0.0, 0.5, 0.8, 0.95), "num_ops": 40, "num_problems": 32, "seed": 3},
        {"fillers": (0.5,), "num_ops": 4, "num_problems": 1},
        alone=False,
    ),
    "prefill_time": Measurement(
        prefill_times,
        ("sparse",),
        {"filler": 0.95, "num_ops": 100, "rows": {1: (16, 32, 64), 32: (512, 1024)}, "repeats": 9, "seed": 4},
        {"num_ops": 4, "rows": {1: (16,)}, "repeats": 1},
        alone=True,
    ),
    "answer_time": Measurement(
        answer_times,
        ("parity-thinking-0", "parity-cot-0"),
        {"num_ops": 10, "batches": (1, 32), "repeats": 30, "seed": 2},
        {"num_ops": 2, "batches": (1,), "repeats": 1},
        alone=True,
    ),
    "speeds": Measurement(
        answer_speeds,
        tuple(COMPARED),
        {"task": "arithmetic", "arms": list(COMPARED.values()), "num_ops": 8, "batch": 8, "repeats": 15, "seed": 5},
        {"num_ops": 1, "batch": 1, "repeats": 1},
        alone=True,
    ),
    "loop_speeds": Measurement(
        answer_speeds,
        tuple(LOOPED),
        {"task": "two_hop", "arms": list(LOOPED.values()), "num_ops": 2, "batch": 8, "repeats": 15, "seed": 5},
        {"num_ops": 1, "batch": 1, "repeats": 1},
        alone=True,
    ),
    "step_time": Measurement(
        steps,
        ("parity-thinking-0",),
        {"shape": (1, 256), "thought_tokens": 128, "num_chunks": (2, 8, 32), "repeats": 15},
        {"shape": (1, 16), "thought_tokens": 8, "num_chunks": (1, 2), "repeats": 1},
        alone=True,
    ),
}


def all_runs(*, quick: bool, only: Sequence[str] = ()) -> list[Run]:
    """All runs in the order in which they should begin.

    First the trainings that measurements need, then measurements that share the machine, then the other trainings, last the
    timed measurements. `only` selects runs and the trainings whose models they measure; `InputError` for an unknown name.
    """
    measured = [Run(name, models_of(one, quick=quick), one.alone) for name, one in MEASUREMENTS.items()]
    starts = {name: starts_from(name) for name in (QUICK_TRAININGS if quick else trainings())}
    trained = [Run(name, (start,) if start else ()) for name, start in starts.items()]
    needed = {name for run in measured for name in run.needs}
    needed |= {start for name, start in starts.items() if name in needed and start}
    runs = [run for run in trained if run.name in needed] + [run for run in measured if not run.alone]
    runs += [run for run in trained if run.name not in needed] + [run for run in measured if run.alone]
    if unknown := set(only) - {run.name for run in runs}:
        raise InputError(f"no run {', '.join(sorted(unknown))}; there are {', '.join(run.name for run in runs)}")
    wanted = set(only)
    for run in reversed(runs):
        wanted |= set(run.needs) if run.name in wanted else set()
    return [run for run in runs if run.name in wanted or not only]


def models_of(measurement: Measurement, *, quick: bool) -> tuple[str, ...]:
    """The runs whose models are measured. A trial trains few: it measures one that thinks in the place of others that do."""

    def trial(name: str) -> str:
        if name == "sparse":
            return "parity-thinking-0"
        if name in LOOPED:
            return {"cot": "known-cot-0"}.get(LOOPED[name], "loop-1")
        return {"cot": "arithmetic-cot-0"}.get(COMPARED[name], "arithmetic-thinking-0") if name in COMPARED else name

    return tuple(trial(name) if quick else name for name in measurement.models)


def perform(name: str, *, workdir: Path, quick: bool) -> None:
    """Executes the run called `name` in this process and leaves its result in `workdir/NAME`."""
    folder = workdir / name
    keep_result(
        folder,
        name,
        lambda: measured(name, workdir, quick=quick) if name in MEASUREMENTS else trained(name, workdir, quick=quick),
    )


def measured(name: str, workdir: Path, *, quick: bool) -> dict[str, Any]:
    """Takes the measurement called `name`."""
    one = MEASUREMENTS[name]
    settings = {**one.settings, **(one.quick if quick else {})}
    models = [load(workdir / needed / "export") for needed in models_of(one, quick=quick)]
    return {"models": list(models_of(one, quick=quick)), "settings": settings, "found": one.function(*models, **settings)}


def trained(name: str, workdir: Path, *, quick: bool) -> dict[str, Any]:
    """Trains the run called `name`, as `detspec train` does; a model that it goes on from is in `workdir`, too."""
    arm = f"{QUICK}{name}" if quick else name
    config = get_config(arm, workdir)
    folder = workdir / name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    run_experiment(config.experiment(folder), workdir=folder, progress=False)
    accuracy = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
    last = [line for line in read_log(folder / "log.jsonl") if "loss" in line][-LAST_STEPS:]
    base = config.base if isinstance(config, CurriculumConfig) else config
    recorded = json.loads(json.dumps(dataclasses.asdict(base)))
    if isinstance(base.backbone, str):
        recorded["backbone"] = str(Path(base.backbone).relative_to(workdir))
    return {
        "command": f"detspec train --config {CONFIG}:{arm}",
        "training_cpu_seconds": time.process_time() - began,
        "config": recorded,
        "task": type(base.task).__name__,
        "starts_from": starts_from(name),
        "latents": config.latents if isinstance(config, CurriculumConfig) else None,
        "loss": mean(line["loss"] for line in last),
        "trained": mean(line["answers"] for line in last),
        "accuracy": {int(n): value for n, value in accuracy["accuracy"].items()},
    }
