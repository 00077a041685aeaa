"""Verification: replays drafts through the canonical pass and counts how many it agrees with.

What a pass reads of a sequence is its last committed token T0 and its drafts, and it answers the tokens after them:

    T1=T1' T2=T2' T3=T3'   accepted 3      T1=T1' T2=T2' T3!=T3'   accepted 2

They are cut into windows like prompts, so a sequence without a draft takes one window, and one with many takes several.
Three sequences with 0, 5 and 2 drafts, windows of 4, six to a pass:

    [T0 - - -] [T0 T1' T2' T3'] [T4' T5' - -] [T0 T1' T2' -] [p p p p] [p p - -]     p: what a fourth lacks of its prompt
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.generation.allot import allotted, expected, pays
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.ops.collectives import share_rows
from detspec.passes import cut, missing, reached, spans
from detspec.sampler import choose_fn
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import NO_SEQUENCE, Draft, GenState, Verified, Windows


class _Answered(NamedTuple):
    """Carry of the loop over passes."""

    targets: jax.Array  # [B, D+1] int32, for `D` drafted tokens
    logprobs: jax.Array  # [B, D+1] float32
    taken_along: jax.Array  # [B] int32, how far sequences that are catching up have come
    cache: KVCache


def verify(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    draft: Draft,
    *,
    schedule: Schedule,
    narrow: Budget | None = None,
    wide_cost: jax.Array | float = 0.0,
) -> Verified:
    """Verifies the draft of every ready sequence that is not `final`; overwrites the draft's keys and values.

    As many passes are run as it takes to give each of these sequences one window, none if there are none. The windows that
    this leaves go to the likeliest drafts, then to what sequences that are catching up lack.

    If the drafts do not pay, see `pays`, a pass of the budget `narrow`, windows of one, reads none of them. `wide_cost` is how
    long the passes of `schedule` take, in narrow passes: float32, 0 for always, inf for never.
    """
    wanted = state.ready & ~draft.final
    is_wide = jnp.bool_(True)
    with jax.named_scope("allot"):
        count = allotted(draft, wanted, state.cache.length, schedule)
        if narrow is not None:
            is_wide = pays(expected(draft.chance, count), wanted, wide_cost)
            count = jnp.where(is_wide, count, 0)
    drafted = state.replace(tokens=draft.appended(state.tokens, state.committed))
    B, D = draft.tokens.shape
    answered = _Answered(
        targets=jnp.zeros((B, D + 1), jnp.int32),
        logprobs=jnp.zeros((B, D + 1), jnp.float32),
        taken_along=jnp.zeros(B, jnp.int32),
        cache=draft.cache,
    )
    # Without `narrow` nearly every step has a sequence that is wanted or catches up, so a pass is run unasked. A loop in the
    # loop over steps would make these take a tenth longer: XLA:CPU hands its work to other threads.
    always = narrow is None
    with jax.named_scope("verify"):
        if not D and schedule.budget == Budget(B, 1):  # `engine.policy.Plan.reads_one_each`
            answered = _read_one_each(params, cfg, drafted, wanted, answered, schedule=schedule, always=always)
        else:
            num_drafts = jnp.where(wanted & is_wide, count, -1)
            answered = _read(params, cfg, drafted, num_drafts, answered, schedule=schedule, always=always)
        if narrow is not None:
            apart = schedule.with_budget(narrow.rows, narrow.window)
            answered = _read_one_each(params, cfg, drafted, wanted & ~is_wide, answered, schedule=apart, always=False)
    cache = answered.cache.replace(length=jnp.maximum(answered.cache.length, answered.taken_along))
    agrees = (answered.targets[:, :D] == draft.tokens) & (jnp.arange(D, dtype=jnp.int32)[None, :] < count[:, None])
    return Verified(
        targets=answered.targets,
        logprobs=answered.logprobs,
        drafted=count,
        accepted=jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32),
        in_pass=wanted,
        cache=cache,
    )


def _read(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    count: jax.Array,
    answered: _Answered,
    *,
    schedule: Schedule,
    always: bool,
) -> _Answered:
    """Passes over the last committed token and `count [B]` drafts, of sequences whose count is not negative.

    None if there are none of these; with `always` there may be one nevertheless.

    The drafts stand in `state.tokens`, after what is committed.
    """
    W = schedule.budget.window
    G = schedule.budget.groups
    length = state.cache.length
    wanted = count >= 0
    lacking = missing(state, schedule)
    of_drafts = spans(length, jnp.where(wanted, length + 1 + count, 0), schedule)
    both = jax.tree.map(lambda own, other: jnp.where(wanted, own, other), of_drafts, lacking)
    given = both.with_first(wanted)
    num_own = jnp.where(wanted, of_drafts.num_windows(W), 0).sum(dtype=jnp.int32)
    walked = state.riders.walked(state.tokens, state.committed, answered.targets.shape[1] - 1)

    def run_pass(carry: tuple[jax.Array, _Answered]) -> tuple[jax.Array, _Answered]:
        done, answered = carry
        windows = cut(given, done + jnp.arange(G, dtype=jnp.int32), state.tokens, W)
        sequence = jnp.maximum(windows.sequence, 0)
        of_row = jnp.repeat(sequence, W)
        position = windows.positions.reshape(-1)
        # Targets after the last committed token are kept; an aligned window holds tokens before it, too.
        after = position - length[of_row]
        is_kept = windows.used.reshape(-1) & wanted[of_row] & (after >= 0)
        windows = windows.replace(wanted=is_kept.reshape(windows.tokens.shape))
        logits_f32, cache = _logits_f32(params, cfg, state, windows, answered.cache, schedule.numerics)
        rows = state.riders.rows(of_row, after, walked)
        choose = choose_fn(state.riders, schedule.numerics)
        chosen, logprob = share_rows(choose, logits_f32, position + 1, rows, texts_fn=lambda: state.tokens[sequence])
        place = jnp.where(is_kept, after, answered.targets.shape[1])
        return done + G, answered._replace(
            targets=answered.targets.at[of_row, place].set(chosen, mode="drop"),
            logprobs=answered.logprobs.at[of_row, place].set(logprob, mode="drop"),
            cache=cache,
        )

    none_done = (jnp.int32(0), answered)
    if always and length.shape[0] <= G:  # one pass is enough
        done, answered = run_pass(none_done)
    else:
        done, answered = jax.lax.while_loop(lambda carry: carry[0] < num_own, run_pass, none_done)
    along = jnp.where(wanted[given.sequence], 0, reached(given, done, W))
    return answered._replace(taken_along=answered.taken_along.at[given.sequence].max(along, unique_indices=True))


def _read_one_each(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    wanted: jax.Array,
    answered: _Answered,
    *,
    schedule: Schedule,
    always: bool,
) -> _Answered:
    """A pass over one token of each sequence, row by row, so that nothing is moved.

    Without `always` there is none if no sequence is `wanted [B]`.

    It is the last committed token of those that are wanted, and the next one that others lack.
    """
    length = state.cache.length
    lacking = missing(state, schedule)
    used = wanted | (lacking.start < lacking.end)
    windows = Windows(
        tokens=jnp.take_along_axis(state.tokens, jnp.minimum(length, state.tokens.shape[1] - 1)[:, None], axis=1),
        sequence=jnp.where(used, jnp.arange(used.shape[0], dtype=jnp.int32), NO_SEQUENCE),
        start=length,
        count=used.astype(jnp.int32),
        wanted=wanted[:, None],
    )

    def run_pass(answered: _Answered) -> _Answered:
        logits_f32, cache = _logits_f32(params, cfg, state, windows, answered.cache, schedule.numerics)
        choose = choose_fn(state.riders, schedule.numerics)
        chosen, logprob = share_rows(choose, logits_f32, length + 1, state.riders.rows(), texts_fn=lambda: state.tokens)
        return _Answered(
            targets=answered.targets.at[:, 0].set(jnp.where(wanted, chosen, answered.targets[:, 0])),
            logprobs=answered.logprobs.at[:, 0].set(jnp.where(wanted, logprob, answered.logprobs[:, 0])),
            taken_along=jnp.where(used & ~wanted, length + 1, answered.taken_along),
            cache=cache,
        )

    if always:
        return run_pass(answered)
    once = (wanted.any(), answered)  # a loop, since `cond` may copy page pools
    return jax.lax.while_loop(lambda carry: carry[0], lambda carry: (jnp.bool_(False), run_pass(carry[1])), once)[1]


def _logits_f32(
    params: Params, cfg: ModelConfig, state: GenState, windows: Windows, cache: KVCache, numerics: Numerics
) -> tuple[jax.Array, KVCache]:
    """The logits of a pass over `windows`, with what a rider adds to the stream, and the cache that it leaves."""
    logits_f32, cache, _ = forward(params, cfg, windows, cache, numerics=numerics, riding=state.riding(windows))
    return logits_f32, cache
