"""What one kind of run hands to the loop: the loop steps, logs, checkpoints and resumes, and knows nothing else of it."""

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
    """One run as the loop sees it; steps count from 0.

    Attributes:
        num_steps: optimiser steps of the run.
        eval_every: steps between evaluations in passing.
        checkpoint_every: steps between checkpoints.
        optimizer: how it steps.
        record: JSON-like; a run goes on only where it is the same. The config, and what tells the data from other data.
        init_params: `() -> params` before the first step, the same each time; also traced for shapes alone.
        loss_fn: `(params, batch) -> (loss, metrics)`, pure, jitted inside the step; metrics are further float scalars for
            the log and the progress bar, such as accuracies.
        batch_at: `step -> batch`, a pytree of numpy arrays that depends on nothing but the step, so that a killed run
            continues bit for bit. Each new shape compiles a step of its own.
        tokens_at: `step -> tokens of its batch` that are trained on, for the speed that is shown.
        evaluate: `(params, step) -> metrics`, the evaluation in passing after `step`, for the log.
        finish: `params -> Result`, the final evaluation and the export; again when a finished run is resumed.
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
    """What a config file makes: frozen settings, whose type is the kind of run."""

    def experiment(self, workdir: Path) -> Experiment:
        """The run these settings describe, in the existing folder `workdir`; `InputError` if its data cannot be had."""
        ...
