"""Drafts that cost nothing: none at all, which is plain canonical decoding, or tokens read from given text."""

import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.draft.source import DraftParams, DraftSource, costs_nothing, draft_limit, no_state
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import Draft, GenState


def no_draft(
    draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule, num_tokens: int
) -> Draft:
    """`DraftSource.draft` that proposes nothing."""
    B = state.tokens.shape[0]
    return Draft(
        tokens=jnp.zeros((B, num_tokens), jnp.int32),
        logprobs=jnp.zeros((B, num_tokens), jnp.float32),
        count=jnp.zeros(B, jnp.int32),
        chance=jnp.zeros(B, jnp.float32),
        final=jnp.zeros(B, bool),
        cache=state.cache,
        state=state.draft,
    )


NONE = DraftSource("none", no_state, no_draft, costs_nothing, executes=False, prior_acceptance=0.0)


def recorded_draft(
    draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule, num_tokens: int
) -> Draft:
    """`DraftSource.draft` that proposes `tokens[b, committed : committed + num_tokens]`.

    `draft_params` are `(tokens, length)`: `tokens [B, T]` int32 are whole sequences from position 0, and `length [B]` int32
    says how many of their positions are in use. Nothing is drafted past them.
    """
    tokens, length = draft_params
    place = state.committed[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    drafted = jnp.take_along_axis(tokens, jnp.minimum(place, tokens.shape[1] - 1), axis=1)
    final = jnp.zeros_like(state.live)
    return Draft(
        tokens=drafted,
        logprobs=jnp.zeros(drafted.shape, jnp.float32),
        count=jnp.clip(length - state.committed, 0, draft_limit(state, num_tokens, final)),
        chance=jnp.ones(final.shape, jnp.float32),
        final=final,
        cache=state.cache,
        state=state.draft,
    )


RECORDED = DraftSource("recorded", no_state, recorded_draft, costs_nothing, executes=False, prior_acceptance=1.0)
