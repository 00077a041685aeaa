"""A draft model as a draft source: other weights, a config and a cache of its own.

It keeps the tokens that its cache holds, and so finds by itself what is still of use:

    held       5 7 9 2 4      length 5, of which 2 4 were drafted and rejected
    committed  5 7 9 3 8      positions 0 to 2 are of use; 3 is read again, 8 is the next input

A rollback, a preemption and another request in the same place all look like that to it.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp

from detspec.cache import KVCache, init_cache
from detspec.config import ModelConfig
from detspec.draft.self_draft import SELF
from detspec.draft.source import DraftSource
from detspec.generation.passes import Stretches, run_passes
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.schedule import Schedule
from detspec.state import Draft, DraftState, GenState, Windows
from detspec.struct import Struct


class Held(Struct):
    """What the draft model's cache holds of each sequence."""

    tokens: jax.Array  # [B, max_len] int32
    length: jax.Array  # [B] int32, positions whose keys and values are in the cache
    page_table: jax.Array  # [B, max_pages] int32


@cache
def draft_model(own_cfg: ModelConfig, share: float = 0.25) -> DraftSource:
    """The draft source of models of `own_cfg`, whose step takes `share` of the target's ordinary one; params are weights."""
    return DraftSource(
        name="model",
        init=partial(_init, own_cfg),
        draft=partial(_draft, own_cfg),
        cost_s=lambda num_tokens, ordinary_step_s: share * num_tokens * ordinary_step_s,
        executes=False,
        prior_acceptance=0.7,
    )


def _init(own_cfg: ModelConfig, cfg: ModelConfig, schedule: Schedule, num_sequences: int, max_len: int) -> DraftState:
    del cfg
    own = init_cache(own_cfg, max_requests=num_sequences, max_len=max_len, numerics=schedule.numerics)
    tokens = jnp.zeros((num_sequences, max_len), jnp.int32)
    return DraftState(sequences=Held(tokens, own.length, own.page_table), shared=(own.k, own.v))


def _draft(
    own_cfg: ModelConfig,
    own_params: Params,
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    schedule: Schedule,
    num_tokens: int,
) -> Draft:
    del params, cfg
    held = state.draft.sequences
    k, v = state.draft.shared
    B, max_len = state.tokens.shape
    place = jnp.arange(max_len, dtype=jnp.int32)[None, :]
    same = (held.tokens == state.tokens) & (place < held.length[:, None])
    of_use = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
    last = state.committed - 1

    def read(windows: Windows, own: KVCache) -> KVCache:
        return forward(own_params, own_cfg, windows, own, numerics=schedule.numerics).cache

    each = jnp.arange(B, dtype=jnp.int32)
    lacking = Stretches(each, start=jnp.minimum(of_use, last), end=jnp.where(state.ready, last, 0))
    own = KVCache(k=k, v=v, page_table=held.page_table, length=last)
    own = run_passes(read, own, state.tokens, lacking, schedule=schedule)
    # From here on it is the self draft of another model, none of whose tokens is a result.
    alike = state.replace(cache=own, live=state.ready, reading=None, deterministic=jnp.ones_like(state.live))
    draft = SELF.draft((), own_params, own_cfg, alike, schedule, num_tokens)
    offset = place[:, : draft.tokens.shape[1]]
    fed = jnp.where(offset < draft.count[:, None] - 1, state.committed[:, None] + offset, max_len)
    tokens = state.tokens.at[each[:, None], fed].set(draft.tokens, mode="drop")
    held = held.replace(
        tokens=jnp.where(state.ready[:, None], tokens, held.tokens),
        length=jnp.where(state.ready, last + draft.count, held.length),
    )
    return draft.replace(cache=state.cache, state=DraftState(sequences=held, shared=(draft.cache.k, draft.cache.v)))
