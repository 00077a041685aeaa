"""Which drafts are verified: the windows of a pass go to the likeliest.

A sequence's first window costs nothing extra, it reads the last committed token. Each further window is worth the tokens that
its drafts are expected to bring, and the passes that are run anyway hold the most valuable ones.
"""

import jax
import jax.numpy as jnp

from detspec.schedule import Schedule
from detspec.state import Draft

SUREST = 0.999  # no draft is believed to be surer than this
MOST_SLOWED = 1.25  # so many times as long may a sequence wait for a token because of the drafts of others


def allotted(draft: Draft, wanted: jax.Array, length: jax.Array, schedule: Schedule) -> jax.Array:
    """How many drafts of each sequence are verified, `[B]` int32: those in the windows that it gets.

    `wanted [B]` sequences share `ceil(wanted / G)` passes of `G` windows; `length [B]` positions of theirs are in the cache.
    """
    W = schedule.budget.window
    G = schedule.budget.groups
    D = draft.tokens.shape[1]
    before = length % W if schedule.numerics.alignment == "window" else jnp.zeros_like(length)
    most = -(-D // W) if schedule.numerics.alignment == "window" else D // W  # further windows of one sequence
    offered = jnp.where(wanted, draft.count, 0)
    if not most:
        return jnp.minimum(offered, W - 1)
    num_wanted = wanted.sum(dtype=jnp.int32)
    room = -num_wanted % G
    # Drafts 1 .. D; further window k = 1, 2 .. holds drafts kW - before .. kW - before + W - 1.
    first = jnp.arange(1, most + 1, dtype=jnp.int32)[:, None] * W - before[None, :]  # [most, B]
    chance = draft.chance[None, :]
    each_offered = offered[None, :]
    worth = expected(chance, jnp.minimum(first + W - 1, each_offered)) - expected(chance, jnp.minimum(first - 1, each_offered))
    gets = (_rank(worth.reshape(-1)) < room).reshape(worth.shape) & (first <= each_offered)
    num_windows = 1 + gets.sum(0, dtype=jnp.int32)
    return jnp.minimum(offered, num_windows * W - before - 1)


def pays(gain: jax.Array, wanted: jax.Array, wide_cost: jax.Array | float) -> jax.Array:
    """Whether a pass that reads drafts pays, bool: it takes `wide_cost` times as long as one that reads none.

    The `wanted [B]` sequences together must bring more tokens for the time; `gain [B]` float32 are those that drafts should
    bring. And none may be slowed down by more than a quarter: where rows are not free, the slowest of a few requests decides
    when all have ended.
    """
    num_wanted = wanted.sum(dtype=jnp.float32)
    least = jnp.where(wanted, gain, jnp.inf).min()
    return (jnp.where(wanted, gain, 0.0).sum() > (wide_cost - 1) * num_wanted) & (wide_cost <= MOST_SLOWED * (1 + least))


def expected(chance: jax.Array, count: jax.Array) -> jax.Array:
    """Tokens that `count` drafts are expected to bring if each agrees with `chance`: `a + a^2 + ... + a^count`, float32."""
    chance = jnp.clip(chance, 0.0, SUREST)
    return chance * (1 - chance ** count.astype(jnp.float32)) / (1 - chance)


def _rank(x: jax.Array) -> jax.Array:
    """How many of `x [n]` are larger than each, or equal and before it, `[n]` int32: all different, and 0 for the largest."""
    number = jnp.arange(x.shape[0], dtype=jnp.int32)
    is_before = (x[None, :] > x[:, None]) | ((x[None, :] == x[:, None]) & (number[None, :] < number[:, None]))
    return is_before.sum(1, dtype=jnp.int32)
