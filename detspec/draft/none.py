"""No guess at all: every window holds one committed token, which is plain canonical decoding."""

import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.state import Draft, GenState


def no_draft(params: Params, cfg: ModelConfig, state: GenState) -> Draft:
    """A `draft_fn` for `W = 1`."""
    del params, cfg
    B = state.tokens.shape[0]
    return Draft(
        tokens=jnp.zeros((B, 0), jnp.int32),
        logprobs=jnp.zeros((B, 0), jnp.float32),
        count=jnp.zeros(B, jnp.int32),
        final=jnp.zeros(B, bool),
        cache=state.cache,
    )
