"""AdamW with warm-up and cosine decay: the settings that every kind of run shares, and the optimiser they describe."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from detspec.errors import InputError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimiser and of its learning rate."""

    peak_lr: float  # learning rate after warm-up; falls by a cosine to `final_lr` at the last step of the run
    final_lr: float  # learning rate of the last step
    warmup_steps: int  # steps of linear warm-up from 0; fewer than the run has
    weight_decay: float = 0.1  # decoupled weight decay, on matrices only
    adam_b1: float = 0.9  # decay of the first moment
    adam_b2: float = 0.95  # decay of the second moment
    clip_norm: float = 1.0  # upper bound of the gradient's global norm

    def require_warmup_within(self, num_steps: int) -> None:
        """Raises `InputError` unless warm-up ends before a run of `num_steps` does."""
        if not isinstance(self.warmup_steps, int) or not 0 <= self.warmup_steps < num_steps:
            raise InputError(
                f"OptimizerConfig.warmup_steps must be an integer in [0, {num_steps}), the steps of the run; "
                f"got {self.warmup_steps!r}"
            )


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) after clipping by global norm; norm scales are not decayed."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            lr_schedule(config, num_steps),
            b1=config.adam_b1,
            b2=config.adam_b2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
    return optax.GradientTransformation(with_promotion(optimizer.init), with_promotion(optimizer.update))


def lr_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then a half cosine that ends at the last step."""
    return optax.warmup_cosine_decay_schedule(0.0, config.peak_lr, config.warmup_steps, num_steps, end_value=config.final_lr)


def with_promotion(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under JAX's standard dtype promotion. Optax raises floats to integer powers, which strict promotion rejects."""

    def call(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return call
