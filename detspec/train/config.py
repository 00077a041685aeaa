"""The frozen description of one training run, and the reader of config files that make one."""

import dataclasses
import runpy
from pathlib import Path

from detspec.config import ModelConfig
from detspec.errors import InputError


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps of one shape: `num_steps` batches of `batch_size` rows of `seq_len` tokens."""

    num_steps: int
    batch_size: int
    seq_len: int

    def __post_init__(self) -> None:
        require_positive(self, "num_steps", "batch_size", "seq_len")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. With the corpus it determines every bit of the result on one kind of device.

    Attributes:
        model: shape of the model; `dtype` is that of the master weights and must be "float32".
        corpus: "python_stdlib", or a folder whose `*.py` and `*.txt` files are the documents.
        phases: one after the other; short rows first, since they are cheap, long ones last, for the positions beyond.
        peak_lr: learning rate after warm-up; falls by a cosine to `final_lr` at the last step of the last phase.
        final_lr: learning rate of the last step.
        warmup_steps: steps of linear warm-up from 0.
        weight_decay: decoupled, on matrices only.
        adam_b1: decay of the first moment.
        adam_b2: decay of the second moment.
        clip_norm: bound of the gradient's global norm.
        holdout_one_in: a document is held out when the SHA-256 of its name is a multiple of this.
        seed: of the initial weights and of the order of rows.
        eval_every: steps between held-out evaluations.
        eval_tokens: held-out tokens of an evaluation in passing; the last one takes all.
        checkpoint_every: steps between checkpoints.
    """

    model: ModelConfig
    corpus: str
    phases: tuple[Phase, ...]
    peak_lr: float
    final_lr: float
    warmup_steps: int
    weight_decay: float = 0.1
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    clip_norm: float = 1.0
    holdout_one_in: int = 25
    seed: int = 0
    eval_every: int = 250
    eval_tokens: int = 16384
    checkpoint_every: int = 250

    def __post_init__(self) -> None:
        require_positive(self, "holdout_one_in", "eval_every", "eval_tokens", "checkpoint_every")
        if not self.phases:
            raise InputError("TrainConfig.phases must name at least one phase")
        if self.model.dtype != "float32":
            raise InputError(f"TrainConfig.model.dtype must be 'float32' (master weights), got {self.model.dtype!r}")
        longest = max(phase.seq_len for phase in self.phases)
        if longest > self.model.max_position:
            raise InputError(f"TrainConfig: seq_len {longest} exceeds model.max_position {self.model.max_position}")
        if not 0 <= self.warmup_steps < self.num_steps:
            raise InputError(f"TrainConfig.warmup_steps must lie in [0, {self.num_steps}), got {self.warmup_steps!r}")

    @property
    def num_steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        """Tokens trained on in all phases."""
        return sum(phase.num_steps * phase.batch_size * phase.seq_len for phase in self.phases)

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase of 0-based `step` and the step within it."""
        for phase in self.phases:
            if step < phase.num_steps:
                return phase, step
            step -= phase.num_steps
        raise IndexError(f"step beyond the {self.num_steps} steps of the run")


def require_positive(config: Phase | TrainConfig, *fields: str) -> None:
    """Raises `InputError` unless each of `fields` is a positive integer."""
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{type(config).__name__}.{field} must be a positive integer, got {value!r}")


def load_config(path: str | Path) -> TrainConfig:
    """Runs the Python file at `path` and returns what its `get_config()` makes; `InputError` if it makes no `TrainConfig`."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such config file")
    get_config = runpy.run_path(str(path)).get("get_config")
    if get_config is None:
        raise InputError(f"{path}: defines no get_config()")
    config = get_config()
    if not isinstance(config, TrainConfig):
        raise InputError(f"{path}: get_config() must return a TrainConfig, got {type(config).__name__}")
    return config
