"""Verification: replays drafts through the canonical pass and counts how many it agrees with.

W = 4, T0 committed, three drafted tokens; the pass reads T0 T1' T2' T3' and answers T1 T2 T3 T4:

    T1=T1' T2=T2' T3=T3'   accepted 3      T1=T1' T2=T2' T3!=T3'   accepted 2
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.generation.passes import cut, missing, reached, those_first
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.ops.collectives import share_rows
from detspec.sampler import sample
from detspec.schedule import Schedule
from detspec.state import NO_SEQUENCE, Draft, GenState, Verified, Windows


class _Answered(NamedTuple):
    """What the loop over passes carries."""

    done: jax.Array  # int32, windows that passes have read
    targets: jax.Array  # [B, W] int32
    logprobs: jax.Array  # [B, W] float32
    cache: KVCache


def verify(params: Params, cfg: ModelConfig, state: GenState, draft: Draft, *, schedule: Schedule) -> Verified:
    """Verifies the draft of every ready sequence that is not `final`, `G` to a pass; overwrites the draft's keys and values.

    The sequences to verify are packed together, so the number of passes is `ceil(sequences / G)`, none if there are none.
    Windows that the last of these passes would leave empty take along what sequences that are catching up lack.
    """
    B = state.tokens.shape[0]
    W = schedule.budget.window
    G = schedule.budget.groups
    wanted = state.ready & ~draft.final
    num_wanted = wanted.sum(dtype=jnp.int32)
    order = those_first(wanted)
    # Committed tokens that a window of this sequence holds before the last one.
    before = state.cache.length % W if schedule.numerics.alignment == "window" else jnp.zeros_like(state.cache.length)
    num_drafted = jnp.minimum(draft.count, W - 1 - before)
    lacking = missing(state, schedule)

    def run_pass(carry: _Answered) -> _Answered:
        index = carry.done + jnp.arange(G, dtype=jnp.int32)
        sequence = order[jnp.minimum(index, B - 1)]
        in_pass = index < num_wanted
        own = _windows(state, draft, sequence, in_pass, before[sequence], num_drafted[sequence])
        along = cut(lacking, index - num_wanted, state.tokens, W)
        windows = jax.tree.map(lambda x, y: jax.vmap(jnp.where)(in_pass, x, y), own, along)
        inject = state.inject(windows)
        logits_f32, cache, _ = forward(params, cfg, windows, carry.cache, numerics=schedule.numerics, inject=inject)

        def texts() -> jax.Array:
            """The sequences' committed tokens, and over them what the windows hold, drafts too, `[G, max_len]`."""
            place = jnp.where(windows.used, windows.positions, state.tokens.shape[1])
            committed = state.tokens[sequence]
            return committed.at[jnp.arange(G, dtype=jnp.int32)[:, None], place].set(windows.tokens, mode="drop")

        rows = jax.tree.map(lambda x: jnp.repeat(x[sequence], W, axis=0), state.sampling)
        position = windows.positions.reshape(-1) + 1
        choose = partial(sample, numerics=schedule.numerics)
        chosen, logprob = share_rows(choose, logits_f32, position, rows, texts_fn=texts)
        place = jnp.where(in_pass, sequence, B)
        return _Answered(
            done=carry.done + G,
            targets=carry.targets.at[place].set(chosen.reshape(G, W), mode="drop"),
            logprobs=carry.logprobs.at[place].set(logprob.reshape(G, W), mode="drop"),
            cache=cache,
        )

    nothing = _Answered(jnp.int32(0), jnp.zeros((B, W), jnp.int32), jnp.zeros((B, W), jnp.float32), draft.cache)
    with jax.named_scope("verify"):
        done, targets, logprobs, cache = jax.lax.while_loop(lambda carry: carry.done < num_wanted, run_pass, nothing)
    taken_along = reached(lacking, jnp.maximum(done - num_wanted, 0), W)
    cache = cache.replace(length=jnp.maximum(cache.length, taken_along))
    if schedule.numerics.alignment == "window":  # bring the target after the last committed token to the front
        shift = jnp.minimum(before[:, None] + jnp.arange(W, dtype=jnp.int32)[None, :], W - 1)
        targets, logprobs = (jnp.take_along_axis(x, shift, axis=1) for x in (targets, logprobs))
    agrees = (targets[:, : W - 1] == draft.tokens) & (jnp.arange(W - 1, dtype=jnp.int32)[None, :] < num_drafted[:, None])
    accepted = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
    return Verified(targets=targets, logprobs=logprobs, drafted=num_drafted, accepted=accepted, in_pass=wanted, cache=cache)


def _windows(
    state: GenState, draft: Draft, sequence: jax.Array, in_pass: jax.Array, before: jax.Array, num_drafted: jax.Array
) -> Windows:
    """Windows of `sequence [G]`: `before` committed tokens, the last committed token, `num_drafted` drafts, padding."""
    W = draft.tokens.shape[1] + 1
    start = state.cache.length[sequence] - before
    offset = jnp.arange(W, dtype=jnp.int32)[None, :]
    place = jnp.minimum(start[:, None] + offset, state.tokens.shape[1] - 1)
    committed = state.tokens[sequence[:, None], place]
    drafted = jnp.pad(draft.tokens, ((0, 0), (1, 0)))[sequence[:, None], jnp.clip(offset - before[:, None], 0, W - 1)]
    return Windows(
        tokens=jnp.where(offset <= before[:, None], committed, drafted),
        sequence=jnp.where(in_pass, sequence, NO_SEQUENCE),
        start=jnp.where(in_pass, start, 0),
        count=jnp.where(in_pass, before + 1 + num_drafted, 0),
    )
