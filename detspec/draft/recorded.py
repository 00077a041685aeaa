"""Guesses read from given text: a recorded completion, or any text at all."""

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.draft.draft_fn import DraftFn, draft_limit
from detspec.model.params import Params
from detspec.state import Draft, GenState


def recorded_draft(tokens: jax.Array, length: jax.Array, window: int) -> DraftFn:
    """A `draft_fn` that guesses `tokens[b, committed : committed + window - 1]`.

    Args:
        tokens: `[B, T]` int32, whole sequences from position 0.
        length: `[B]` int32, positions of `tokens` in use; nothing is guessed past them.
        window: `W`.
    """

    def draft(params: Params, cfg: ModelConfig, state: GenState) -> Draft:
        del params, cfg
        place = state.committed[:, None] + jnp.arange(window - 1, dtype=jnp.int32)[None, :]
        guessed = jnp.take_along_axis(tokens, jnp.minimum(place, tokens.shape[1] - 1), axis=1)
        final = jnp.zeros_like(state.live)
        count = jnp.clip(length - state.committed, 0, draft_limit(state, window, final))
        logprobs = jnp.zeros(guessed.shape, jnp.float32)
        return Draft(tokens=guessed, logprobs=logprobs, count=count, final=final, cache=state.cache)

    return draft
