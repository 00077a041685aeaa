"""Prompt lookup as a draft source: what followed the last two tokens where they stood before. Runs no model.

committed 5 7 9 2 5 7    the last two stand at places 0 and 1 too    drafts 9 2 5 7
"""

import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.draft.source import DraftParams, DraftSource, costs_nothing, draft_limit, no_state
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import Draft, GenState


def lookup(draft_params: DraftParams, params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> Draft:
    del draft_params, params, cfg
    W, max_len = schedule.budget.window, state.tokens.shape[1]
    place = jnp.arange(max_len, dtype=jnp.int32)[None, :]
    last = state.committed[:, None] - 1
    newest = jnp.take_along_axis(state.tokens, last, axis=1)
    before = jnp.take_along_axis(state.tokens, jnp.maximum(last - 1, 0), axis=1)
    earlier = jnp.pad(state.tokens, ((0, 0), (1, 0)))[:, :max_len]  # the token before each place
    stands = (state.tokens == newest) & (earlier == before) & (place >= 1) & (place < last)
    found = jnp.where(stands, place, -1).max(1)  # the most recent place, -1 if there is none
    offset = jnp.arange(W - 1, dtype=jnp.int32)[None, :]
    drafted = jnp.take_along_axis(state.tokens, jnp.minimum(found[:, None] + 1 + offset, max_len - 1), axis=1)
    final = jnp.zeros_like(state.live)
    count = jnp.where(found < 0, 0, jnp.minimum(last[:, 0] - found, draft_limit(state, W, final)))
    logprobs = jnp.zeros(drafted.shape, jnp.float32)
    return Draft(tokens=drafted, logprobs=logprobs, count=count, final=final, cache=state.cache, state=state.draft)


LOOKUP = DraftSource("lookup", no_state, lookup, costs_nothing, executes=False, prior_acceptance=0.3)
