"""What a kind of run hands to the training loop, which steps, logs, checkpoints and resumes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from detspec.model.params import Params
from detspec.train.optimizer import OptimizerConfig
from detspec.train.step import LossFn


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run reports.

    Attributes:
        metrics: the final evaluation, for the log and the user.
        export: folder of the trained model.
    """

    metrics: dict[str, float]
    export: Path


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run as the loop sees it. Steps count from 0.

    Attributes:
        num_steps: optimiser steps of the run.
        eval_every: steps between evaluations during training.
        checkpoint_every: steps between checkpoints.
        optimizer: settings of the optimiser.
        record: JSON-like; holds the config and a digest of the data. A run resumes only if it is unchanged.
        init_params: `() -> params` before the first step, the same each time; also traced for shapes alone.
        loss_fn: `(params, batch) -> (loss, metrics)`, pure, jitted inside the step. Metrics are float scalars, such as
            accuracies, for the log and the progress bar.
        batch_at: `step -> batch`, a pytree of numpy arrays that depends on the step alone, so that a killed run continues
            bit for bit. Each new shape compiles another step.
        tokens_at: `step -> number of tokens` that its batch trains on, for the speed shown.
        evaluate: `(params, step) -> metrics`, the evaluation after `step` during training, for the log.
        finish: `params -> Result`, the final evaluation and the export; runs again when a finished run is resumed.
    """

    num_steps: int
    eval_every: int
    checkpoint_every: int
    optimizer: OptimizerConfig
    record: dict[str, Any]
    init_params: Callable[[], Params]
    loss_fn: LossFn
    batch_at: Callable[[int], Any]
    tokens_at: Callable[[int], int]
    evaluate: Callable[[Params, int], dict[str, float]]
    finish: Callable[[Params], Result]


@runtime_checkable
class TrainConfig(Protocol):
    """What a config file makes: frozen settings. Their type is the kind of run."""

    def experiment(self, workdir: Path) -> Experiment:
        """The run that these settings describe, in the existing folder `workdir`; `InputError` if its data is missing."""
        ...
