"""Prompt lookup: what followed the last tokens where they stood before in the same text. Runs no model.

committed 5 7 9 2 5 7    the last two stand at places 0 and 1, too    drafts 9 2 5 7, and again, since a loop goes on

Published as prompt lookup decoding (A. Saxena, 2023); names are those of vLLM's method "ngram". Of the longest matches it takes
the latest. How often drafts agree after a match of each length is counted on the device, and says how many are verified.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.draft.source import DraftParams, DraftSource, costs_nothing, draft_limit
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import Draft, DraftState, GenState
from detspec.struct import Struct

SEARCHED = 4096  # latest positions of a text that are searched, so that steps do not grow with its length
PRIOR_COUNTS = 4.0  # drafts that the assumed chance counts as
REMEMBERED = 512.0  # drafts after which older ones count less and less


class Looked(Struct):
    """Prompt lookup of each sequence the last time, to be compared with what became of it."""

    matched: jax.Array  # [B] int32, tokens that matched; 0 if none did
    committed: jax.Array  # [B] int32
    drafted: jax.Array  # [B] int32, `num_draft_tokens` before
    accepted: jax.Array  # [B] int32, `num_accepted_draft_tokens` before


@cache
def ngram(min_match: int = 2, max_match: int = 4) -> DraftSource:
    """The draft source that looks for the last `min_match` to `max_match` tokens."""
    return DraftSource(
        name="ngram",
        init=partial(_init, max_match),
        draft=partial(_draft, (min_match, max_match)),
        cost_s=costs_nothing,
        executes=False,
        prior_acceptance=0.5,
        searches=True,
    )


def acceptance_by_match_length(state: DraftState) -> dict[int, float]:
    """Measured chance that a draft agrees after a match of so many tokens, for those after which any was verified."""
    agreed, differed = np.asarray(state.shared).astype(float)
    return {n: agreed[n] / (agreed[n] + differed[n]) for n in np.flatnonzero(agreed + differed).tolist()}


def _init(max_match: int, cfg: ModelConfig, schedule: Schedule, state: GenState) -> DraftState:
    nothing = Looked(*(jnp.zeros_like(state.committed) for _ in range(4)))
    return DraftState(sequences=nothing, shared=jnp.zeros((2, max_match + 1), jnp.float32))


def _draft(
    lengths: tuple[int, int],
    draft_params: DraftParams,
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    schedule: Schedule,
    num_tokens: int,
) -> Draft:
    """`DraftSource.draft`: the tokens that followed the latest of the longest matches; `lengths` are the least and the most."""
    min_match, max_match = lengths
    seen = _counted(state)
    begin, texts = _latest(state)
    B, T = texts.shape
    committed = state.committed - begin  # within what is searched
    place = jnp.arange(T, dtype=jnp.int32)[None, :]
    padded = jnp.pad(texts, ((0, 0), (max_match, 0)), constant_values=-1)
    same = place < committed[:, None]
    run = jnp.zeros((B, T), jnp.int32)  # how many tokens before each place equal the last ones
    for back in range(1, max_match + 1):
        last = jnp.take_along_axis(texts, jnp.maximum(committed - back, 0)[:, None], axis=1)
        same &= padded[:, max_match - back : max_match - back + T] == last
        run += same.astype(jnp.int32)
    best = jnp.where(run >= min_match, run * T + place, 0).max(1)  # the longest, and of those the latest
    matched = best // T
    at = best % T
    ahead = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] % jnp.maximum(committed - at, 1)[:, None]
    tokens = jnp.take_along_axis(texts, at[:, None] + ahead, axis=1)
    final = jnp.zeros_like(state.live)
    count = jnp.where(matched > 0, draft_limit(state, num_tokens, final), 0)
    agreed, differed = seen
    assumed = jnp.asarray(_assumed(max_match))
    chance = (agreed + PRIOR_COUNTS * assumed) / (agreed + differed + PRIOR_COUNTS)
    looked = Looked(
        matched=jnp.where(count > 0, matched, 0),
        committed=state.committed,
        drafted=state.counters.num_draft_tokens,
        accepted=state.counters.num_accepted_draft_tokens,
    )
    return Draft(
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        count=count,
        chance=chance[matched],
        final=final,
        cache=state.cache,
        state=DraftState(sequences=looked, shared=seen),
    )


def _latest(state: GenState) -> tuple[jax.Array, jax.Array]:
    """The latest `SEARCHED` positions of each text, `[B, <= SEARCHED]` int32, and the position that they begin at, `[B]`."""
    B, max_len = state.tokens.shape
    if max_len <= SEARCHED:
        return jnp.zeros(B, jnp.int32), state.tokens
    begin = jnp.maximum(state.committed - SEARCHED, 0)
    return begin, jax.vmap(lambda text, first: jax.lax.dynamic_slice(text, (first,), (SEARCHED,)))(state.tokens, begin)


def _counted(state: GenState) -> jax.Array:
    """How many drafts agreed and differed after matches of each length, `[2, max_match + 1]`, the last ones included."""
    before = state.draft.sequences
    drafted = state.counters.num_draft_tokens - before.drafted
    accepted = state.counters.num_accepted_draft_tokens - before.accepted
    # Not if another request has the place now, or another source has drafted since.
    is_seen = (drafted > 0) & (accepted >= 0) & (state.committed == before.committed + accepted + 1) & (before.matched > 0)
    new = jnp.stack([jnp.where(is_seen, accepted, 0), (is_seen & (accepted < drafted)).astype(jnp.int32)]).astype(jnp.float32)
    added = jnp.zeros_like(state.draft.shared).at[:, before.matched].add(new)
    keep = jnp.maximum(0.0, 1 - added.sum(0, keepdims=True) / REMEMBERED)
    return keep * state.draft.shared + added


def _assumed(max_match: int) -> np.ndarray:
    """Chance of a draft after a match of each length before any was verified: longer matches mislead less."""
    return 1 - np.float32(0.7) ** np.arange(max_match + 1, dtype=np.float32)
