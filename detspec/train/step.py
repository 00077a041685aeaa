"""One optimiser step and the loss it lowers, as pure functions."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from detspec.config import ModelConfig
from detspec.model.params import Params, init_params
from detspec.model.transformer import forward_sequences
from detspec.train.config import TrainConfig


@flax.struct.dataclass
class TrainState:
    """All that a step changes.

    Attributes:
        step: optimiser steps done, int32 scalar.
        params: float32 master weights.
        opt_state: moments of AdamW and its own step count.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState


def lr_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from 0, then a half cosine that ends at the last step."""
    return optax.warmup_cosine_decay_schedule(
        0.0, config.peak_lr, config.warmup_steps, config.num_steps, end_value=config.final_lr
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) after clipping by global norm; norm scales are not decayed."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            lr_schedule(config),
            b1=config.adam_b1,
            b2=config.adam_b2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
    return optax.GradientTransformation(with_promotion(optimizer.init), with_promotion(optimizer.update))


def with_promotion(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under JAX's standard promotion of dtypes: optax raises floats to integer powers, which the strict one refuses."""

    def call(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return call


def init_state(config: TrainConfig) -> TrainState:
    """The state before the first step."""
    params = init_params(config.model, jax.random.key(config.seed))
    return TrainState(step=jnp.int32(0), params=params, opt_state=make_optimizer(config).init(params))


def token_losses(params: Params, cfg: ModelConfig, rows: jax.Array) -> jax.Array:
    """Cross entropy in nats of every next token of `rows [B, T + 1]`: float32 `[B, T]`."""
    logits, _ = forward_sequences(params, cfg, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])


def make_train_step(config: TrainConfig) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted step `(state, rows [B, T + 1]) -> (state, {"loss", "grad_norm"})`; the state given is donated."""
    optimizer = make_optimizer(config)

    def train_step(state: TrainState, rows: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(params: Params) -> jax.Array:
            return token_losses(params, config.model, rows).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        return new_state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return jax.jit(train_step, donate_argnums=0)
