"""The type of a draft source, and how much a row may guess."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.state import Draft, GenState

DraftFn = Callable[[Params, ModelConfig, GenState], Draft]


def draft_limit(state: GenState, window: int, final: jax.Array) -> jax.Array:
    """Most tokens each row may guess, `[B]` int32: those that fit the window and the row's remaining length.

    A verified row gets one token more than it guessed, so it may guess `limit - committed - 1`; a `final [B]` row commits its
    guesses as they are.
    """
    remaining = state.limit - state.committed - (~final).astype(jnp.int32)
    return jnp.where(state.ready, jnp.clip(remaining, 0, window - 1), 0)
