"""Drafts that cost nothing: none at all, which is plain canonical decoding, or tokens read from given text."""

import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.draft.source import DraftParams, DraftSource, costs_nothing, draft_limit, no_state
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import Draft, GenState
from detspec.thinking.drafts import draft_no_thoughts


def no_draft(draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> Draft:
    """`DraftSource.draft` that proposes nothing, for windows of any length."""
    B = state.tokens.shape[0]
    W = schedule.budget.window
    tokens = jnp.zeros((B, W - 1), jnp.int32)
    logprobs = jnp.zeros((B, W - 1), jnp.float32)
    return Draft(tokens, logprobs, jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), state.cache, state.draft)


NONE = DraftSource("none", no_state, no_draft, costs_nothing, executes=False, prior_acceptance=0.0, think=draft_no_thoughts)


def recorded_draft(draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> Draft:
    """`DraftSource.draft` that proposes `tokens[b, committed : committed + W - 1]`.

    `draft_params` are `(tokens, length)`: `tokens [B, T]` int32 are whole sequences from position 0, and `length [B]` int32
    says how many of their positions are in use. Nothing is drafted past them.
    """
    tokens, length = draft_params
    W = schedule.budget.window
    place = state.committed[:, None] + jnp.arange(W - 1, dtype=jnp.int32)[None, :]
    drafted = jnp.take_along_axis(tokens, jnp.minimum(place, tokens.shape[1] - 1), axis=1)
    final = jnp.zeros_like(state.live)
    count = jnp.clip(length - state.committed, 0, draft_limit(state, W, final))
    logprobs = jnp.zeros(drafted.shape, jnp.float32)
    return Draft(tokens=drafted, logprobs=logprobs, count=count, final=final, cache=state.cache, state=state.draft)


RECORDED = DraftSource("recorded", no_state, recorded_draft, costs_nothing, executes=False, prior_acceptance=1.0)
