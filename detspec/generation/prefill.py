"""Catching up: writes the keys and values of all committed tokens but the last, through the canonical pass.

The last committed token is left to the next window, whose first target is the next token: a prompt of one token needs no
prefill, and a preempted request catches up by the same function. Two sequences, the second of one token:

    tokens     5 7 9 3 8    committed 5    length before 0    read 5 7 9 3    length after 4
               2            committed 1    length before 0    nothing to read  length after 0

Passes that answer read the last token of the first one, too, and commit the token after it: a step less.

    tokens     5 7 9 3 8    committed 5    length before 0    read 5 7 9 3 8  length after 5    committed after 6
"""

from typing import Any

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.draft.given import NONE
from detspec.generation.commit import commit
from detspec.model.layers import head_f32
from detspec.model.params import Params
from detspec.model.rows import canonical_ops
from detspec.model.transformer import embedded, forward, last_normed
from detspec.ops.collectives import share_rows
from detspec.passes import Spans, limited, missing, run_passes
from detspec.sampler import choose_fn
from detspec.schedule import Schedule
from detspec.state import NO_SEQUENCE, GenState, Verified, Windows


def read_by_riders(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    schedule: Schedule,
    new: jax.Array | None = None,
    max_passes: jax.Array | None = None,
) -> GenState:
    """Lets the rider that reads prompts itself do so, in `max_passes` passes at most.

    `new [B]` bool are the sequences that were just put in, all live ones if None.
    """
    reader = state.riders.reader
    if reader is None:
        return state
    new = state.live if new is None else new
    return reader.read(params, cfg, state, new, schedule=schedule, max_passes=max_passes)


def prefill(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, max_passes: jax.Array | None = None
) -> GenState:
    """Brings every live sequence to `cache.length == committed - 1`, or as far as `max_passes` passes do."""
    lacking = missing(state, schedule)
    if max_passes is not None:
        lacking = limited(lacking, max_passes, schedule)

    def run_pass(windows: Windows, cache: KVCache) -> KVCache:
        _, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics, riding=state.riding(windows))
        return cache

    with jax.named_scope("prefill"):
        cache = run_passes(run_pass, state.cache, state.tokens, lacking, schedule=schedule)
    return state.replace(cache=cache.replace(length=jnp.maximum(state.cache.length, lacking.end)))


def prefill_and_answer(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, max_passes: jax.Array, answers: jax.Array
) -> GenState:
    """As `prefill`; if it `answers`, bool, every sequence that lacked something and has caught up gets its next token.

    Passes then read the last committed token as well, and what they say is the token of a step without drafts.
    """
    lacking = missing(state, schedule)
    asked = (lacking.start < lacking.end) & answers
    given = limited(lacking.replace(end=jnp.where(asked, state.committed, lacking.end)), max_passes, schedule)
    asked &= given.end == state.committed
    with jax.named_scope("prefill"):
        normed, cache = _read_to_head(params, cfg, state, given, asked, schedule=schedule)
    length = jnp.maximum(cache.length, jnp.minimum(given.end, state.committed - 1))
    state = state.replace(cache=cache.replace(length=length))

    def answer() -> tuple[jax.Array, jax.Array]:
        logits_f32 = head_f32(params, cfg, normed, canonical_ops(cfg, schedule.numerics, asked))
        choose = choose_fn(state.riders, schedule.numerics)
        return share_rows(choose, logits_f32, state.committed, state.riders.rows(), texts_fn=lambda: state.tokens)

    with jax.named_scope("answer"):
        nothing = jnp.zeros(asked.shape, jnp.int32), jnp.zeros(asked.shape, jnp.float32)
        tokens, logprobs = jax.lax.cond(asked.any(), answer, lambda: nothing)
    draft = NONE.draft((), params, cfg, state, schedule, 0)
    none = jnp.zeros(asked.shape, jnp.int32)
    verified = Verified(tokens[:, None], logprobs[:, None], drafted=none, accepted=none, in_pass=asked, cache=state.cache)
    return commit(state, draft, verified)


def _read_to_head(
    params: Params, cfg: ModelConfig, state: GenState, given: Spans, asked: jax.Array, *, schedule: Schedule
) -> tuple[Any, KVCache]:
    """Reads the spans `given`; returns the input `[B, D]` of the output head after each that is `asked`, and the cache."""
    numerics = schedule.numerics
    number = jnp.arange(asked.shape[0], dtype=jnp.int32)

    def run_pass(windows: Windows, carry: tuple[Any, KVCache]) -> tuple[Any, KVCache]:
        found, cache = carry
        sequence = jnp.maximum(windows.sequence, 0)[:, None]
        is_last = windows.used & asked[sequence] & (windows.positions == given.end[sequence] - 1)
        windows = windows.replace(wanted=is_last)
        riding = state.riding(windows)
        _, cache, stream = forward(params, cfg, windows, cache, numerics=numerics, riding=riding, tap_layer=cfg.num_layers)
        assert stream is not None
        of_row = jnp.where(is_last, sequence, NO_SEQUENCE).reshape(1, -1)
        is_own = of_row == number[:, None]  # [B, R]
        row = jnp.argmax(is_own, axis=1)

        def kept(before: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(is_own.any(1).reshape(-1, *(1,) * (new.ndim - 1)), new[row], before)

        return jax.tree.map(kept, found, last_normed(params, cfg, stream, numerics=numerics)), cache

    def of_tokens() -> Any:
        return last_normed(params, cfg, embedded(params, cfg, number, number, numerics=numerics), numerics=numerics)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_tokens))
    return run_passes(run_pass, (nothing, state.cache), state.tokens, given, schedule=schedule)
