"""Drafts of the thoughts that a sequence has not committed yet. A wrong one costs a pass, never correctness.

A function of `DRAFTED` puts drafts into the thoughts of a `Reading`, after the chunks from `read` on, before the first pass of
`think_prompt`. It writes only cache slots that verification rewrites. Recorded thoughts need none: requests bring them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.schedule import Schedule
from detspec.state import NO_SEQUENCE, GenState, Injected, Windows
from detspec.thinking.blocks import compress_if_any, think, thinking_of
from detspec.thinking.reading import reading_of
from detspec.thinking.thoughts import trivial_thoughts


def draft_no_thoughts(params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> GenState:
    """Expects nothing more to think: speculative prefill as published (Thinking States, section 3)."""
    reading = reading_of(state)
    place = jnp.arange(reading.thoughts.shape[1], dtype=jnp.int32)
    committed = (place[None, :] < reading.read[:, None])[:, :, None]
    trivial = trivial_thoughts(reading.thoughts.shape, thinking_of(cfg).end_id)
    return state.having(thoughts=reading.replace(thoughts=jnp.where(committed, reading.thoughts, trivial)))


class _ReadAhead(NamedTuple):
    """Carry of the loop over chunks."""

    step: jax.Array  # int32, chunks that were read ahead
    states: jax.Array  # [B, C, D], for the next chunk of each sequence
    thoughts: jax.Array  # [B, X, M] int32
    cache: KVCache


def draft_thoughts(params: Params, cfg: ModelConfig, state: GenState, schedule: Schedule) -> GenState:
    """Reads ahead on the cheapest shape, chunk after chunk, all sequences in one batch.

    A pass holds one chunk of each sequence, `B * C` token rows, with sums and products in XLA's order. A chunk gets the
    states of the thought that was just drafted, so drafts are nearly always right. It pays where `B` chunks are much less
    than a canonical pass and most chunks are thought about.
    """
    reading = reading_of(state)
    thinking = thinking_of(cfg)
    B = state.tokens.shape[0]
    C = thinking.chunk
    fast = schedule.with_budget(B * C, C).with_numerics(reductions="native", linear="xla")
    sequence = jnp.arange(B, dtype=jnp.int32)
    unread = jnp.where(state.live, reading.end - reading.read, 0)

    def draft_next(carry: _ReadAhead) -> _ReadAhead:
        going = carry.step < unread
        place = jnp.where(going, reading.read + carry.step, 0)
        positions = place[:, None] * C + jnp.arange(C, dtype=jnp.int32)[None, :]
        windows = Windows(
            tokens=jnp.take_along_axis(state.tokens, positions, axis=1),
            sequence=jnp.where(going, sequence, NO_SEQUENCE),
            start=positions[:, 0],
            count=jnp.where(going, C, 0).astype(jnp.int32),
        )
        _, cache, tapped = forward(
            params,
            cfg,
            windows,
            carry.cache,
            numerics=fast.numerics,
            riding=state.riding(windows)._replace(inject=Injected(thinking.in_layer, carry.states)),
            tap_layer=thinking.out_layer,
        )
        assert tapped is not None
        drafted = carry.thoughts[sequence, place]
        thought = think(params, cfg, tapped, drafted, lambda rejected: going, numerics=fast.numerics)
        return _ReadAhead(
            step=carry.step + 1,
            states=compress_if_any(params, cfg, thought, going, numerics=fast.numerics),
            thoughts=carry.thoughts.at[jnp.where(going, sequence, B), place].set(thought, mode="drop"),
            cache=cache,
        )

    with jax.named_scope("draft_thoughts"):
        carry = _ReadAhead(jnp.int32(0), reading.states, reading.thoughts, state.cache)
        done = jax.lax.while_loop(lambda carry: jnp.any(carry.step < unread), draft_next, carry)
    return state.replace(cache=done.cache).having(thoughts=reading.replace(thoughts=done.thoughts))


# How thoughts are drafted, by the names of `EngineConfig.thoughts`: there is nothing to think, or the model reads ahead.
DRAFTED = {"none": draft_no_thoughts, "self": draft_thoughts}
