"""Commit: takes what the canonical pass agreed with and one token more; rollback is the smaller length that results.

W = 4, T0 at position p is the last committed token:

    accepted 3   commit T1 T2 T3 and the bonus T4        committed + 4, length p + 4
    accepted 2   commit T1 T2 and the correction T3      committed + 3, length p + 3; slots p+3 and later are stale
"""

from typing import Any

import jax.numpy as jnp

from detspec.riders.rider import Committed
from detspec.state import LENGTH, NOT_FINITE, RUNNING, STOP, Draft, GenState, Verified


def commit(state: GenState, draft: Draft, verified: Verified | None = None) -> GenState:
    """Appends each ready sequence's new tokens; it ends at a stop token, at its limit, or at a log-probability not finite.

    Everything after the first stop token, and everything past the limit, is void. Ordinary sequences take their draft as it
    is. `verified` is None if all of them are ordinary.
    """
    tokens = draft.tokens
    logprobs = draft.logprobs
    offered = draft.count
    cache = draft.cache
    if verified is not None:
        in_pass = verified.in_pass[:, None]
        tokens = jnp.where(in_pass, verified.targets, jnp.pad(tokens, ((0, 0), (0, 1))))  # [B, W]
        logprobs = jnp.where(in_pass, verified.logprobs, jnp.pad(logprobs, ((0, 0), (0, 1))))
        offered = jnp.where(verified.in_pass, verified.accepted + 1, offered)
        cache = verified.cache
    offered = jnp.where(state.ready, jnp.minimum(offered, state.limit - state.committed), 0)

    num_new, finish = ending(state.sampling.is_stop(tokens), logprobs, offered, state.limit - state.committed)
    finish = jnp.where(state.ready, finish, state.finish).astype(jnp.int32)

    B, max_len = state.tokens.shape
    sequence = jnp.arange(B, dtype=jnp.int32)[:, None]
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    place = jnp.where(offset < num_new[:, None], state.committed[:, None] + offset, max_len)
    committed = state.committed + num_new
    return state.replace(
        tokens=state.tokens.at[sequence, place].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[sequence, place].set(logprobs, mode="drop"),
        committed=committed,
        live=state.live & (finish == RUNNING),
        finish=finish,
        riders=state.riders.observed(Committed(tokens, num_new, verified)),
        cache=cache.replace(length=jnp.where(state.ready, committed - 1, cache.length)),
        draft=draft.state,
    )


def ending(is_stop: Any, logprobs: Any, offered: Any, room: Any) -> tuple[Any, Any]:
    """Finds where texts end: at a stop token, which is kept, before a log-probability that is not finite, or with no room left.

    Device and audits ask it, with arrays of jax or of numpy.

    Args:
        is_stop: `[B, W]` bool, whether a token ends its text.
        logprobs: `[B, W]` float32, log-probabilities of the tokens.
        offered: `[B]` int32, tokens that may be taken, at most `room`.
        room: `[B]` int32, tokens that the text may still get.

    Returns:
        `[B]` int32, tokens that are taken, and `[B]` int32, `LENGTH`, `STOP`, `NOT_FINITE`, or `RUNNING` if the text goes on.
    """
    xp = logprobs.__array_namespace__()
    within = xp.arange(logprobs.shape[1], dtype=xp.int32)[None, :] < offered[:, None]
    broken_at = _first(xp, within & ~xp.isfinite(logprobs), offered)
    stop_at = _first(xp, within & is_stop, offered)
    num_new = xp.minimum(broken_at, xp.minimum(stop_at + 1, offered))
    finish = xp.where(num_new >= room, LENGTH, RUNNING)
    finish = xp.where(stop_at < xp.minimum(offered, broken_at), STOP, finish)
    return num_new, xp.where(broken_at < xp.minimum(offered, stop_at + 1), NOT_FINITE, finish)


def _first(xp: Any, true_at: Any, none: Any) -> Any:
    """Index of the first True in each line of `true_at [B, n]`, or `none [B]`."""
    return xp.where(true_at.any(1), xp.argmax(true_at, axis=1).astype(xp.int32), none)
