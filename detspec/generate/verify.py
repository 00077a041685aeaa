"""Verification: replays guesses through the canonical pass and counts how many it agrees with.

W = 4, T0 committed, three guesses; the pass reads T0 T1' T2' T3' and answers T1 T2 T3 T4:

    T1=T1' T2=T2' T3=T3'   accepted 3      T1=T1' T2=T2' T3!=T3'   accepted 2
"""

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.generate.passes import cut, missing, reached
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.sampler import sample
from detspec.schedule import Schedule
from detspec.state import NO_ROW, Draft, GenState, Verified, Windows


def verify(params: Params, cfg: ModelConfig, state: GenState, draft: Draft, *, schedule: Schedule) -> Verified:
    """Verifies the draft of every ready row that is not `final`, `G` rows to a pass; overwrites the draft's keys and values.

    The rows to verify are packed together, so the number of passes is `ceil(rows / G)`, none if there are none. Windows that
    the last of these passes would leave empty take along what rows that are catching up lack.
    """
    B, W, G = state.tokens.shape[0], schedule.budget.window, schedule.budget.groups
    wanted = state.ready & ~draft.final
    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)  # rows to verify first
    num_wanted = wanted.sum(dtype=jnp.int32)
    # Committed tokens that a window of this row holds before the last one.
    before = state.cache.length % W if schedule.numerics.alignment == "window" else jnp.zeros_like(state.cache.length)
    num_guessed = jnp.minimum(draft.count, W - 1 - before)
    lacking = missing(state, schedule)

    def run_pass(
        carry: tuple[jax.Array, jax.Array, jax.Array, KVCache],
    ) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
        done, targets, logprobs, cache = carry
        index = done + jnp.arange(G, dtype=jnp.int32)
        row = order[jnp.minimum(index, B - 1)]
        in_pass = index < num_wanted
        own = _windows(state, draft, row, in_pass, before[row], num_guessed[row])
        along = cut(lacking, index - num_wanted, state.tokens, W)
        windows = jax.tree.map(lambda x, y: jax.vmap(jnp.where)(in_pass, x, y), own, along)
        logits_f32, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics, inject=state.inject(windows))

        def texts() -> jax.Array:
            """The rows' committed tokens, and over them what the windows hold, guesses too, `[G, max_len]`."""
            place = jnp.where(windows.used, windows.positions, state.tokens.shape[1])
            return state.tokens[row].at[jnp.arange(G, dtype=jnp.int32)[:, None], place].set(windows.tokens, mode="drop")

        rows = jax.tree.map(lambda x: jnp.repeat(x[row], W, axis=0), state.sampling)
        position = windows.positions.reshape(-1) + 1
        chosen, logprob = sample(logits_f32.reshape(G * W, -1), position, rows, texts, numerics=schedule.numerics)
        place = jnp.where(in_pass, row, B)
        targets = targets.at[place].set(chosen.reshape(G, W), mode="drop")
        logprobs = logprobs.at[place].set(logprob.reshape(G, W), mode="drop")
        return done + G, targets, logprobs, cache

    carry = (jnp.int32(0), jnp.zeros((B, W), jnp.int32), jnp.zeros((B, W), jnp.float32), draft.cache)
    with jax.named_scope("verify"):
        done, targets, logprobs, cache = jax.lax.while_loop(lambda carry: carry[0] < num_wanted, run_pass, carry)
    taken_along = reached(lacking, jnp.maximum(done - num_wanted, 0), W)
    cache = cache.replace(length=jnp.maximum(cache.length, taken_along))
    if schedule.numerics.alignment == "window":  # bring the target after the last committed token to the front
        shift = jnp.minimum(before[:, None] + jnp.arange(W, dtype=jnp.int32)[None, :], W - 1)
        targets, logprobs = (jnp.take_along_axis(x, shift, axis=1) for x in (targets, logprobs))
    agrees = (targets[:, : W - 1] == draft.tokens) & (jnp.arange(W - 1, dtype=jnp.int32)[None, :] < num_guessed[:, None])
    accepted = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
    return Verified(targets=targets, logprobs=logprobs, guessed=num_guessed, accepted=accepted, verified=wanted, cache=cache)


def unverified(draft: Draft) -> Verified:
    """What `commit` needs when every row's draft is `final`: nobody was verified."""
    shape = (draft.tokens.shape[0], draft.tokens.shape[1] + 1)
    return Verified(
        targets=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        guessed=jnp.zeros(shape[0], jnp.int32),
        accepted=jnp.zeros(shape[0], jnp.int32),
        verified=jnp.zeros(shape[0], bool),
        cache=draft.cache,
    )


def _windows(
    state: GenState, draft: Draft, row: jax.Array, in_pass: jax.Array, before: jax.Array, num_guessed: jax.Array
) -> Windows:
    """Windows of `row [G]`: `before` committed tokens, the last committed token, `num_guessed` guesses, padding."""
    W = draft.tokens.shape[1] + 1
    start = state.cache.length[row] - before
    offset = jnp.arange(W, dtype=jnp.int32)[None, :]
    place = jnp.minimum(start[:, None] + offset, state.tokens.shape[1] - 1)
    committed = state.tokens[row[:, None], place]
    guesses = jnp.pad(draft.tokens, ((0, 0), (1, 0)))[row[:, None], jnp.clip(offset - before[:, None], 0, W - 1)]
    return Windows(
        tokens=jnp.where(offset <= before[:, None], committed, guesses),
        row=jnp.where(in_pass, row, NO_ROW),
        start=jnp.where(in_pass, start, 0),
        count=jnp.where(in_pass, before + 1 + num_guessed, 0),
    )
