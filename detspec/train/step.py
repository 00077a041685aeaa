"""An optimiser step as a pure function of a state and a batch's slices, for any loss."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from detspec.model.params import Params
from detspec.struct import Struct
from detspec.train.data_parallel import sum_over_slices


class Mean(NamedTuple):
    """A metric that is divided once, after the sums over slices; float32 scalars."""

    total: jax.Array
    number: jax.Array  # number of values that `total` adds up


StepMetrics = dict[str, jax.Array | Mean]
LossFn = Callable[[Params, Any], tuple[jax.Array, StepMetrics]]


class TrainState(Struct):
    """All that a step changes."""

    step: jax.Array  # optimiser steps done, int32 scalar
    params: Params  # float32 master weights
    opt_state: optax.OptState  # moments and step count of AdamW


TrainStep = Callable[[TrainState, Sequence[Any]], tuple[TrainState, dict[str, Any]]]
MakeStep = Callable[..., TrainStep]  # see `make_train_step`


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))


def make_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, chips: Sequence[jax.Device] | None = None
) -> TrainStep:
    """The step `(state, slices) -> (state, metrics)`; it donates the state it is given.

    `loss_fn(params, slice) -> (loss, metrics)` gives a slice's share: sums over all slices are the batch's. A `Mean` is divided
    after that. Metrics of the step are float scalars: "loss", those of `loss_fn`, and "grad_norm".

    The state is on the first of `chips`, by default jax's first device. Their number changes no bit of the result.
    """
    chips = jax.local_devices()[:1] if chips is None else chips
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))

    @partial(jax.jit, donate_argnums=0)
    def update(
        state: TrainState, gradient: tuple[tuple[jax.Array, StepMetrics], Params]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        (loss, metrics), grads = gradient
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        # dict() raises if two metrics have the same name.
        return new_state, dict(loss=loss, **divided(metrics), grad_norm=optax.tree.norm(grads))

    def train_step(state: TrainState, slices: Sequence[Any]) -> tuple[TrainState, dict[str, jax.Array]]:
        return update(state, sum_over_slices(gradient, state.params, slices, chips=chips))

    return train_step


def divided(metrics: StepMetrics) -> dict[str, jax.Array]:
    """`metrics` as numbers; the mean of nothing is 0."""
    return {
        name: value.total / jnp.maximum(value.number, 1.0) if isinstance(value, Mean) else value
        for name, value in metrics.items()
    }
