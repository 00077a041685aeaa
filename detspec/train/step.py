"""One optimiser step as a pure function of a state and a batch, for any loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from detspec.model.params import Params
from detspec.struct import Struct

LossFn = Callable[[Params, Any], tuple[jax.Array, dict[str, jax.Array]]]
Metrics = dict[str, jax.Array]


class TrainState(Struct):
    """All that a step changes."""

    step: jax.Array  # optimiser steps done, int32 scalar
    params: Params  # float32 master weights
    opt_state: optax.OptState  # moments and step count of AdamW


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))


def make_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The jitted step `(state, batch) -> (state, metrics)`; it donates the state it is given.

    Metrics are float scalars: "loss", those that `loss_fn(params, batch) -> (loss, metrics)` adds, and "grad_norm".
    """

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        # dict() raises if two metrics have the same name.
        return new_state, dict(loss=loss, **metrics, grad_norm=optax.tree.norm(grads))

    return jax.jit(train_step, donate_argnums=0)
