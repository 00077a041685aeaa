"""No draft: every window holds one committed token, which is plain canonical decoding."""

import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.draft.source import DraftParams, DraftSource, costs_nothing, no_state
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import Draft, GenState
from detspec.thinking.drafts import draft_no_thoughts


def no_draft(draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> Draft:
    """`DraftSource.draft` that proposes nothing, for windows of any length."""
    B = state.tokens.shape[0]
    W = schedule.budget.window
    return Draft(
        tokens=jnp.zeros((B, W - 1), jnp.int32),
        logprobs=jnp.zeros((B, W - 1), jnp.float32),
        count=jnp.zeros(B, jnp.int32),
        final=jnp.zeros(B, bool),
        cache=state.cache,
        state=state.draft,
    )


NONE = DraftSource("none", no_state, no_draft, costs_nothing, executes=False, prior_acceptance=0.0, think=draft_no_thoughts)
