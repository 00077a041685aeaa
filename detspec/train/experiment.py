"""An experiment, which a kind of run hands to the training loop, and the config files that describe it."""

import dataclasses
import inspect
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import optax

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.dense import config_to_json
from detspec.model.params import Params
from detspec.train.optimizer import OptimizerConfig
from detspec.train.step import LossFn, MakeStep, TrainState, init_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Result:
    """Report of a finished run."""

    metrics: dict[str, float]  # the final evaluation, for the log and the user
    export: Path  # folder of the trained model


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run as the loop sees it. Steps count from 0."""

    num_steps: int  # optimiser steps of the run
    eval_every: int  # steps between evaluations during training
    checkpoint_every: int  # steps between checkpoints
    optimizer: OptimizerConfig  # settings of the optimiser
    record: dict[str, Any]  # JSON-like; holds the config and a digest of the data. A run resumes only if it is unchanged.
    init_params: Callable[[], Params]  # `() -> params` before the first step, the same each time; also traced for shapes alone
    # `(params, slice) -> (loss, metrics)`, pure, jitted inside the step. Sums over the slices of a batch are the batch's.
    # Metrics are float scalars or a `Mean`, such as accuracies, for the log and the progress bar.
    loss_fn: LossFn
    # `step -> batch`, a pytree of numpy arrays that depends on the step alone, so that a killed run continues bit for bit.
    batch_at: Callable[[int], Any]
    tokens_at: Callable[[int], int]  # `step -> number of tokens` that its batch trains on, for the speed shown
    # `(params, step) -> metrics`, the evaluation after `step` during training, for the log
    evaluate: Callable[[Params, int], dict[str, float]]
    # `params -> Result`, the final evaluation and the export; runs again when a finished run is resumed
    finish: Callable[[Params], Result]
    # `batch -> slices`, pytrees of numpy arrays in equal shapes, which several chips share out. Their number depends on the
    # batch alone. Each new shape compiles another program. By default the whole batch is one slice, for one chip.
    cut: Callable[[Any], Sequence[Any]] = lambda batch: [batch]
    exports: str = ""  # says before the first step what `finish` will write
    # `(loss_fn, optimizer, chips=) -> step`, where a step takes a state and the slices of a batch. Runs whose batches depend on
    # the weights have their own.
    make_step: MakeStep = make_train_step
    init_state: Callable[[Params, optax.GradientTransformation], TrainState] = init_state  # of `init_params()`
    keep_checkpoints: int = 2  # the newest checkpoints that are kept


@runtime_checkable
class TrainConfig(Protocol):
    """Frozen settings that a config file makes; their type is the kind of run."""

    def experiment(self, workdir: Path) -> Experiment:
        """The run that these settings describe, in the existing folder `workdir`; `InputError` if its data is missing."""
        ...


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a config of a run for its record; a model's shape as checkpoints have it, so that old runs resume."""
    shapes = {name: config_to_json(value) for name, value in vars(config).items() if isinstance(value, ModelConfig)}
    return {**dataclasses.asdict(config), **shapes}


def load_config(source: str | Path) -> TrainConfig:
    """Runs the Python file that `source`, "FILE" or "FILE:ARM", names; returns its `get_config()` or `get_config(ARM)`.

    Raises `InputError` if the file is missing, `get_config` takes no arm or needs one, or the result is no config of a run.
    """
    path, arm = split_source(source)
    if not path.is_file():
        raise InputError(f"{path}: no such config file")
    get_config = runpy.run_path(str(path)).get("get_config")
    if get_config is None:
        raise InputError(f"{path}: defines no get_config()")
    args = () if arm is None else (arm,)
    try:
        inspect.signature(get_config).bind(*args)
    except TypeError as error:
        wrong = f"needs an arm; give {path}:ARM" if arm is None else f"takes no arm, got {arm!r}; give {path} alone"
        raise InputError(f"{path}: its get_config {wrong}") from error
    config = get_config(*args)
    if not isinstance(config, TrainConfig):
        kind = type(config).__name__
        raise InputError(f"{path}: get_config must return the config of a run, such as LanguageConfig; got {kind}")
    return config


def split_source(source: str | Path) -> tuple[Path, str | None]:
    """Splits "FILE" or "FILE:ARM" into file and arm. The arm follows the last colon; without a colon it is None."""
    file, colon, arm = str(source).rpartition(":")
    if not colon:
        return Path(source), None
    if not file or not arm:
        raise InputError(f"config {str(source)!r} must be FILE or FILE:ARM")
    return Path(file), arm


def require_seed(config: Any) -> None:
    """Raises `InputError` unless `config.seed` is an integer of at least 0."""
    if not isinstance(config.seed, int) or isinstance(config.seed, bool) or config.seed < 0:
        raise InputError(f"{type(config).__name__}.seed must be an integer of at least 0, got {config.seed!r}")
