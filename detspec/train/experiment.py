"""What a kind of run hands to the training loop, which steps, logs, checkpoints and resumes."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from detspec.model.params import Params
from detspec.train.optimizer import OptimizerConfig
from detspec.train.step import LossFn


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run reports."""

    metrics: dict[str, float]  # the final evaluation, for the log and the user
    export: Path  # folder of the trained model


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run as the loop sees it. Steps count from 0."""

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


@runtime_checkable
class TrainConfig(Protocol):
    """What a config file makes: frozen settings. Their type is the kind of run."""

    def experiment(self, workdir: Path) -> Experiment:
        """The run that these settings describe, in the existing folder `workdir`; `InputError` if its data is missing."""
        ...
