"""A training run from config to exported model. `Experiment` describes what is trained.

1. Read the config; its type makes the `Experiment`.
2. Restore the newest checkpoint in `workdir`, or start from the initial state; cut the log back to that step.
3. Say what will be exported.
4. Step, log, evaluate, checkpoint. A batch depends on its step alone, so a killed run continues bit for bit. Its slices may be
   on several chips; the state is on the first one, so that what is saved can be restored on any number of chips.
5. Run the final evaluation and export the model.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from detspec.checkpoint.store import Store, local_sharding
from detspec.errors import InputError
from detspec.mesh import first_devices
from detspec.progress import Progress
from detspec.read_json import differing_entries
from detspec.say import say
from detspec.train.data_parallel import MAX_SLICES, require_equal_shares
from detspec.train.experiment import Experiment, Result, load_config, split_source
from detspec.train.optimizer import lr_schedule, make_optimizer
from detspec.train.step import TrainState, TrainStep

LOG_NAME = "log.jsonl"
SUMS = 2  # the order of sums in trainings: a run goes on with that of its beginning
RUN_NAME = "run.json"  # says which config file the run in a folder began with


def train(config: str | Path, *, workdir: str | Path, chips: int = 1, resume: bool = True, progress: bool = True) -> Result:
    """Trains what `config`, "FILE" or "FILE:ARM", describes, in `workdir`; resumes a run there unless `resume` is off.

    The weights have the same bits on any number of `chips`, and a run may be resumed on another number.

    Raises `InputError` if the config is bad, if `workdir` holds a run of another config or data (without `resume`: any run), or
    if there are fewer than `chips` or the slices of the first batch cannot be dealt out evenly to them.
    """
    settings = load_config(config)
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / RUN_NAME).exists():
        file, arm = split_source(config)
        source = f"{file.resolve()}{'' if arm is None else f':{arm}'}"
        (workdir / RUN_NAME).write_text(json.dumps({"config": source}) + "\n")
    return run_experiment(settings.experiment(workdir), workdir=workdir, chips=chips, resume=resume, progress=progress)


def run_experiment(
    experiment: Experiment, *, workdir: Path, chips: int = 1, resume: bool = True, progress: bool = True
) -> Result:
    """Runs `experiment` in the existing folder `workdir`; errors as in `train`."""
    devices = first_devices(chips, jax.local_devices())
    require_equal_shares(chips, len(experiment.cut(experiment.batch_at(0))))
    logging.getLogger("absl").setLevel(logging.WARNING)
    optimizer = make_optimizer(experiment.optimizer, experiment.num_steps)
    train_step = experiment.make_step(experiment.loss_fn, optimizer, chips=devices)
    record = record_of(experiment)
    with Store(workdir / "checkpoints", max_to_keep=experiment.keep_checkpoints) as store:
        state = restore_or_init(store, experiment, optimizer, record, resume=resume)
        done = int(state.step)
        if progress and experiment.exports:
            say(experiment.exports)
        with Log(workdir / LOG_NAME, keep_steps=done) as log:
            with Progress(experiment.num_steps, "steps", done=done, shown=progress) as shown:
                state = run_steps(experiment, state, train_step, store, log, record, progress=shown)
                shown.stage("final evaluation and export", at_once=True)
            result = experiment.finish(state.params)
            log.append({"step": experiment.num_steps, "final": result.metrics})
    return result


def record_of(experiment: Experiment) -> dict[str, Any]:
    """Names all that decides the bits of a run, as checkpoints hold it; and how sums are ordered."""
    return dict(json.loads(json.dumps({**experiment.record, "max_slices": MAX_SLICES, "sums": SUMS})))


def restore_or_init(
    store: Store, experiment: Experiment, optimizer: optax.GradientTransformation, record: dict[str, Any], *, resume: bool
) -> TrainState:
    """The state of the newest checkpoint, or the initial state if there is none; committed to one device in both cases.

    jit compiles separately for committed and uncommitted arrays. So a resumed run finds the first run's programs compiled.
    """
    step = store.latest_step()
    if step is None:
        return jax.device_put(experiment.init_state(experiment.init_params(), optimizer), local_sharding())
    if not resume:
        raise InputError(f"{store.folder} already holds a run (step {step}); resume it or choose another workdir")
    if differing := sorted(name for name, _, _ in differing_entries(store.record(step), record)):
        raise InputError(
            f"{store.folder}: the run was started with another config or data; differing: {', '.join(differing)}; "
            "give it the config and data of its start, or choose another workdir"
        )
    return store.restore(step, jax.eval_shape(lambda: experiment.init_state(experiment.init_params(), optimizer)))


def run_steps(
    experiment: Experiment,
    state: TrainState,
    train_step: TrainStep,
    store: Store,
    log: "Log",
    record: dict[str, Any],
    *,
    progress: Progress,
) -> TrainState:
    """Runs the steps from `state.step` on. The log is on disk before each checkpoint is written."""
    lr_at = lr_schedule(experiment.optimizer, experiment.num_steps)
    first_step = int(state.step)
    num_steps = experiment.num_steps
    evaluated: dict[str, float] = {}
    for step in range(first_step, num_steps):
        if step == first_step:
            progress.stage("compiling", at_once=True)
        began = time.perf_counter()
        state, scalars = train_step(state, experiment.cut(experiment.batch_at(step)))
        metrics = {name: value if isinstance(value, str) else float(value) for name, value in scalars.items()}
        loss = metrics.pop("loss")
        grad_norm = metrics.pop("grad_norm")
        if not np.isfinite(loss):
            raise FloatingPointError(f"training diverged: loss {loss} at step {step + 1}; lower peak_lr or clip_norm")
        tok_per_s = experiment.tokens_at(step) / (time.perf_counter() - began)
        done = step + 1
        lr = float(lr_at(step))
        # dict() raises if a metric has the name of another entry.
        log.append(dict(step=done, loss=loss, **metrics, lr=lr, grad_norm=grad_norm, tok_per_s=tok_per_s))
        if done % experiment.eval_every == 0:
            evaluated = experiment.evaluate(state.params, step)
            log.append({"step": done, **evaluated})
        if done % experiment.checkpoint_every == 0 or done == num_steps:
            log.sync()
            store.save(done, state, record)
        progress.finished()
        if step == first_step:
            progress.stage("training")  # begins to measure the time for the rest, without compiling
        shown = {"loss": loss, **metrics, **evaluated}
        values = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if not isinstance(value, str))
        progress.show(f"{values}, {tok_per_s:,.0f} tok/s", at_once=done in (first_step + 1, num_steps))
    return state


class Log:
    """The log file: one JSON object a line."""

    def __init__(self, path: Path, *, keep_steps: int | None = None) -> None:
        """Opens it; with `keep_steps` it drops what a killed run wrote after its last checkpoint."""
        if keep_steps is not None:
            kept = [line for line in read_log(path) if line["step"] <= keep_steps and "final" not in line]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(temporary, path)
        self.file = path.open("a")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, line: dict[str, Any]) -> None:
        """Writes one line and hands it to the operating system."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def sync(self) -> None:
        """Returns when all lines are on disk."""
        os.fsync(self.file.fileno())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last line that a kill cut off."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
