"""The runs of the replication in order: trainings, then measurements on the exported models; `perform` executes one."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detspec.checkpoint.load import Model, load
from detspec.errors import InputError
from detspec.train.run import read_log, train
from replications.pool import Run, keep_result
from replications.thinking_states.answer_time import answer_times
from replications.thinking_states.forced import forced_flips
from replications.thinking_states.prefill import prefill_times, rounds_by_sparsity
from replications.thinking_states.runs import QUICK, get_config, trainings
from replications.thinking_states.step_time import step_times

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "replications/thinking_states/config.py"
QUICK_TRAININGS = ("parity-thinking-0", "parity-cot-0")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One measurement: `function(*models, **settings)`; `quick` holds the settings that differ in a trial."""

    function: Callable[..., Any]
    models: tuple[str, ...]
    settings: dict[str, Any]
    quick: dict[str, Any]
    alone: bool


def steps(model: Model, **settings: Any) -> list[dict[str, Any]]:
    """Step times of models of this shape; the weights do not matter."""
    return step_times(model.cfg, **settings)


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
    needed = {name for run in measured for name in run.needs}
    trained = [Run(name) for name in (QUICK_TRAININGS if quick else trainings())]
    runs = [run for run in trained if run.name in needed] + [run for run in measured if not run.alone]
    runs += [run for run in trained if run.name not in needed] + [run for run in measured if run.alone]
    if unknown := set(only) - {run.name for run in runs}:
        raise InputError(f"no run {', '.join(sorted(unknown))}; there are {', '.join(run.name for run in runs)}")
    wanted = {*only, *(needed for run in runs if run.name in only for needed in run.needs)}
    return [run for run in runs if run.name in wanted or not only]


def models_of(measurement: Measurement, *, quick: bool) -> tuple[str, ...]:
    """The runs whose models are measured; a trial trains no sparse one."""
    return tuple("parity-thinking-0" if quick and name == "sparse" else name for name in measurement.models)


def perform(name: str, *, workdir: Path, quick: bool) -> None:
    """Executes the run called `name` in this process and leaves its result in `workdir/NAME`."""
    folder = workdir / name
    keep_result(
        folder,
        name,
        lambda: measured(name, workdir, quick=quick) if name in MEASUREMENTS else trained(name, folder, quick=quick),
    )


def measured(name: str, workdir: Path, *, quick: bool) -> dict[str, Any]:
    """Takes the measurement called `name`."""
    one = MEASUREMENTS[name]
    settings = {**one.settings, **(one.quick if quick else {})}
    models = [load(workdir / needed / "export") for needed in models_of(one, quick=quick)]
    return {"models": list(models_of(one, quick=quick)), "settings": settings, "found": one.function(*models, **settings)}


def trained(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Trains the run called `name`, as `detspec train` does."""
    arm = f"{QUICK}{name}" if quick else name
    config = get_config(arm)
    began = time.process_time()
    train(f"{ROOT / CONFIG}:{arm}", workdir=folder, progress=False)
    accuracy = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
    last = [line for line in read_log(folder / "log.jsonl") if "loss" in line][-1]
    return {
        "command": f"detspec train --config {CONFIG}:{arm}",
        "training_cpu_seconds": time.process_time() - began,
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "task": type(config.task).__name__,
        "loss": last["loss"],
        "accuracy": {int(n): value for n, value in accuracy["accuracy"].items()},
    }
