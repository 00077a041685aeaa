"""Guesses of the thoughts that a row has not committed yet. A wrong one costs a pass, never correctness.

A source of guesses is a function `guess_fn(params, cfg, state) -> state` that `read` calls before its first pass. It puts
guesses in `reading.thoughts` after the chunks from `read` on, and writes only cache slots that verification rewrites.

Recorded thoughts need no source: `pack_requests(..., thoughts=)` puts them in with their requests, and `read` without a
`guess_fn` takes what is there.
"""

from functools import cache

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.choices import GUESSES
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.schedule import Schedule
from detspec.state import NO_ROW, GenState, Windows
from detspec.thinking.blocks import compress_if_any, think, thinking_of
from detspec.thinking.think_prompt import GuessFn
from detspec.thinking.thoughts import trivial_thoughts


def guess_fn(name: str, schedule: Schedule) -> GuessFn:
    """The source called `name`, one of `GUESSES`, beside canonical passes of `schedule`; the same function every time."""
    if name == "trivial":
        return trivial_guesses
    if name == "sequential":
        return sequential_guesses(schedule)
    raise InputError(f"there is no source of guessed thoughts called {name!r}: choose one of {GUESSES}")


def trivial_guesses(params: Params, cfg: ModelConfig, state: GenState) -> GenState:
    """Guesses that there is nothing more to think: speculative prefill as published (Thinking States, section 3)."""
    del params
    reading = state.reading
    assert reading is not None
    place = jnp.arange(reading.thoughts.shape[1], dtype=jnp.int32)
    committed = (place[None, :] < reading.read[:, None])[:, :, None]
    trivial = trivial_thoughts(reading.thoughts.shape, thinking_of(cfg).end_id)
    return state.replace(reading=reading.replace(thoughts=jnp.where(committed, reading.thoughts, trivial)))


@cache
def sequential_guesses(schedule: Schedule) -> GuessFn:
    """A `guess_fn` that reads ahead on the cheapest shape: chunk after chunk, all rows that read side by side.

    A pass holds one chunk of each row, `B * C` token rows, with sums and products in XLA's order. A chunk gets the states of
    the thought that was just guessed, so guesses are nearly always right. It pays where `B` chunks are much less than a
    canonical pass and most chunks are thought about.
    """

    def guess(params: Params, cfg: ModelConfig, state: GenState) -> GenState:
        reading, thinking = state.reading, thinking_of(cfg)
        assert reading is not None
        B, C = state.tokens.shape[0], thinking.chunk
        fast = schedule.with_budget(B * C, C).with_numerics(reductions="native", linear="xla")
        row = jnp.arange(B, dtype=jnp.int32)
        unread = jnp.where(state.live, reading.end - reading.read, 0)

        def guess_next(
            carry: tuple[jax.Array, jax.Array, jax.Array, KVCache],
        ) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
            step, states, thoughts, cache = carry
            going = step < unread
            place = jnp.where(going, reading.read + step, 0)
            positions = place[:, None] * C + jnp.arange(C, dtype=jnp.int32)[None, :]
            windows = Windows(
                tokens=jnp.take_along_axis(state.tokens, positions, axis=1),
                row=jnp.where(going, row, NO_ROW),
                start=positions[:, 0],
                count=jnp.where(going, C, 0).astype(jnp.int32),
            )
            _, cache, tapped = forward(
                params, cfg, windows, cache, numerics=fast.numerics, inject=states, tap_layer=thinking.out_layer
            )
            assert tapped is not None
            thought = think(params, cfg, tapped, thoughts[row, place], lambda refused: going, numerics=fast.numerics)
            states = compress_if_any(params, cfg, thought, going, numerics=fast.numerics)
            thoughts = thoughts.at[jnp.where(going, row, B), place].set(thought, mode="drop")
            return step + 1, states, thoughts, cache

        with jax.named_scope("guess"):
            carry = jnp.int32(0), reading.states, reading.thoughts, state.cache
            _, _, thoughts, cache = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < unread), guess_next, carry)
        return state.replace(reading=reading.replace(thoughts=thoughts), cache=cache)

    return guess
