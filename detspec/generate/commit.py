"""Commit: takes what the canonical pass agreed with and one token more; rollback is the smaller length that results.

W = 4, T0 at position p is the last committed token:

    accepted 3   commit T1 T2 T3 and the bonus T4        committed + 4, length p + 4
    accepted 2   commit T1 T2 and the correction T3      committed + 3, length p + 3; slots p+3 and later are stale
"""

import jax
import jax.numpy as jnp

from detspec.state import LENGTH, NOT_FINITE, RUNNING, STOP, Counters, Draft, GenState, Verified
from detspec.stopping import is_stop


def commit(state: GenState, draft: Draft, verified: Verified) -> GenState:
    """Appends each ready row's new tokens; ends rows at a stop token, at their limit, or where a log-probability is not finite.

    Everything after the first stop token, and everything past the limit, is void. Ordinary rows take their draft as it is.
    """
    guesses = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    guess_logprobs = jnp.pad(draft.logprobs, ((0, 0), (0, 1)))
    tokens = jnp.where(verified.verified[:, None], verified.targets, guesses)  # [B, W]
    logprobs = jnp.where(verified.verified[:, None], verified.logprobs, guess_logprobs)
    offered = jnp.where(verified.verified, verified.accepted + 1, draft.count)
    offered = jnp.where(state.ready, jnp.minimum(offered, state.limit - state.committed), 0)

    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    within = offset < offered[:, None]
    broken_at = _first(within & ~jnp.isfinite(logprobs), offered)
    stop_at = _first(within & is_stop(tokens, state.sampling.stop_ids), offered)
    num_new = jnp.minimum(broken_at, jnp.minimum(stop_at + 1, offered))

    B, max_len = state.tokens.shape
    row = jnp.arange(B, dtype=jnp.int32)[:, None]
    place = jnp.where(offset < num_new[:, None], state.committed[:, None] + offset, max_len)
    committed = state.committed + num_new
    finish = jnp.where(committed >= state.limit, LENGTH, RUNNING)
    finish = jnp.where(stop_at < jnp.minimum(offered, broken_at), STOP, finish)
    finish = jnp.where(broken_at < jnp.minimum(offered, stop_at + 1), NOT_FINITE, finish)
    finish = jnp.where(state.ready, finish, state.finish).astype(jnp.int32)
    cache = verified.cache.replace(length=jnp.where(state.ready, committed - 1, verified.cache.length))
    return state.replace(
        tokens=state.tokens.at[row, place].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[row, place].set(logprobs, mode="drop"),
        committed=committed,
        live=state.live & (finish == RUNNING),
        finish=finish,
        counters=_count(state.counters, verified, num_new),
        cache=cache,
    )


def _first(true_at: jax.Array, none: jax.Array) -> jax.Array:
    """Index of the first True of each row of `true_at [B, n]`, or `none [B]`."""
    return jnp.where(true_at.any(1), jnp.argmax(true_at, axis=1).astype(jnp.int32), none)


def _count(counters: Counters, verified: Verified, num_new: jax.Array) -> Counters:
    """A rollback is a guess that was refused inside the committed run; what a stop token made void is none."""
    was_verified = verified.verified.astype(jnp.int32)
    drafted = verified.guessed * was_verified
    accepted = jnp.minimum(verified.accepted, num_new) * was_verified
    rolled_back = verified.verified & (verified.accepted < verified.guessed) & (num_new == verified.accepted + 1)
    return Counters(
        num_verify_passes=counters.num_verify_passes + was_verified,
        num_draft_tokens=counters.num_draft_tokens + drafted,
        num_accepted_draft_tokens=counters.num_accepted_draft_tokens + accepted,
        num_rollbacks=counters.num_rollbacks + rolled_back.astype(jnp.int32),
        num_recomputed_tokens=counters.num_recomputed_tokens + jnp.where(rolled_back, drafted - verified.accepted, 0),
    )
