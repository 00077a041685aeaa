"""Reading a prompt by a model that thinks: draft thoughts, verify them, commit by index.

A pass reads up to `G` chunks, each with the states of the thought that is guessed for the chunk before it. `C = 4`, three
chunks of one row with guesses Z0' Z1' Z2':

    pass in    chunk 0 with 0    chunk 1 with states(Z0')    chunk 2 with states(Z1')
    pass out   Z0                Z1                          Z2

    all guesses right                  -> commit Z0 Z1 Z2                                  read 3, length 12
    Z0 = Z0', Z1 != Z1'                -> commit Z0 and the correction Z1; Z2 is void      read 2, length 8

Rollback is that smaller `read` and `length`. A pass commits at least one chunk of every row in it. With nothing but trivial
guesses this is the speculative prefill of Thinking States (section 3), which takes one round more than there are thoughts.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.schedule import Schedule
from detspec.state import NO_ROW, READING_COUNTERS, GenState, Reading, Windows
from detspec.thinking.blocks import compress_if_any, think, thinking_of
from detspec.thinking.thoughts import trivial_thoughts

# (params, cfg, state) -> state with guesses in `reading.thoughts`; cache slots that verification rewrites may have changed
GuessFn = Callable[[Params, ModelConfig, GenState], GenState]


def init_reading(cfg: ModelConfig, *, max_requests: int, max_len: int, schedule: Schedule) -> Reading:
    """Nobody has read anything, and all guesses are trivial.

    Raises:
        InputError: the model does not think, or its chunks and thoughts do not fit the schedule.
    """
    thinking = thinking_of(cfg)
    C, M = thinking.chunk, thinking.max_thought
    if schedule.budget.rows % C:
        raise InputError(
            f"a canonical pass of {schedule.budget.rows} rows cannot be cut into chunks of {C} tokens: choose Budget.rows as a "
            "multiple of ThinkingConfig.chunk"
        )
    if schedule.numerics.page < C + M - 1:
        raise InputError(
            f"a chunk of {C} tokens and a thought of up to {M} do not fit a page of {schedule.numerics.page} slots together: "
            f"raise Numerics.page to at least {C + M - 1}, or lower ThinkingConfig.max_thought"
        )
    if schedule.numerics.alignment != "free":
        raise InputError(
            f'a model that thinks needs Numerics.alignment "free", got {schedule.numerics.alignment!r}: aligned windows would '
            "read chunks again without their states"
        )
    return Reading(
        thoughts=trivial_thoughts((max_requests, max(max_len // C, 1), M), thinking.end_id),
        states=jnp.zeros((max_requests, C, cfg.d_model), cfg.jax_dtype),
        **{name: jnp.zeros(max_requests, jnp.int32) for name in ("read", "end", *READING_COUNTERS)},
        end_id=thinking.end_id,
    )


def read(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    schedule: Schedule,
    guess_fn: GuessFn | None = None,
    max_passes: jax.Array | None = None,
) -> GenState:
    """Reads the prompts of all live rows that think, up to their last chunk, or as far as `max_passes` passes reach.

    Args:
        params, cfg: a model that thinks.
        state: its `reading` holds the guesses; trivial ones from `init_reading`.
        schedule: of the canonical pass; its windows do not matter, they are the chunks.
        guess_fn: guesses anew, before the first pass.
        max_passes: at most so many.
    """
    if guess_fn is not None:
        state = guess_fn(params, cfg, state)
    limit = jnp.int32(2**30) if max_passes is None else max_passes

    def unread(carry: tuple[jax.Array, GenState]) -> jax.Array:
        passes, state = carry
        return (passes < limit) & jnp.any(state.live & ~state.catching_up)

    def run_pass(carry: tuple[jax.Array, GenState]) -> tuple[jax.Array, GenState]:
        passes, state = carry
        return passes + 1, read_pass(params, cfg, state, schedule=schedule)

    with jax.named_scope("read"):
        return jax.lax.while_loop(unread, run_pass, (jnp.int32(0), state))[1]


def read_pass(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """One canonical pass over the next chunks of the rows that are reading: verifies their guesses and commits."""
    reading, thinking = state.reading, thinking_of(cfg)
    assert reading is not None
    chunks = next_chunks(state, schedule.budget.rows // thinking.chunk)
    row = jnp.maximum(chunks.windows.row, 0)
    place = reading.read[row] + chunks.depth

    # 1. What each chunk is given: the committed states for a row's first, those of the guess before it for the others.
    before = reading.thoughts[row, jnp.maximum(place - 1, 0)]
    guessed = (chunks.depth > 0) & chunks.used
    assumed = compress_if_any(params, cfg, before, guessed, numerics=schedule.numerics)
    inject = jnp.where((chunks.depth == 0)[:, None, None], reading.states[row], assumed)

    # 2. The pass, and the thoughts after its chunks.
    _, cache, tapped = forward(
        params, cfg, chunks.windows, state.cache, numerics=schedule.numerics, inject=inject, tap_layer=thinking.out_layer
    )
    assert tapped is not None
    guesses = reading.thoughts[row, place]
    B = state.committed.shape[0]

    def wanted(refused: jax.Array) -> jax.Array:
        """What follows a wrong guess is void."""
        return chunks.used & (chunks.depth <= _before_refused(chunks, refused, B)[row])

    thoughts = think(params, cfg, tapped, guesses, wanted, numerics=schedule.numerics)

    # 3. Commit each row's thoughts up to and with the first that was guessed wrong.
    offered = jnp.zeros(B, jnp.int32).at[jnp.where(chunks.used, row, B)].add(1, mode="drop")
    accepted = jnp.minimum(_before_refused(chunks, (thoughts != guesses).any(1), B), offered)
    gained = jnp.minimum(accepted + 1, offered)
    committed = chunks.used & (chunks.depth < gained[row])
    is_last = committed & (chunks.depth == gained[row] - 1)
    states = compress_if_any(params, cfg, thoughts, is_last, numerics=schedule.numerics)
    took_part = (offered > 0).astype(jnp.int32)
    reading = reading.replace(
        thoughts=reading.thoughts.at[jnp.where(committed, row, B), place].set(thoughts, mode="drop"),
        read=reading.read + gained,
        states=reading.states.at[jnp.where(is_last, row, B)].set(states, mode="drop"),
        num_passes=reading.num_passes + took_part,
        num_guesses=reading.num_guesses + gained,
        num_accepted=reading.num_accepted + accepted,
        num_refused=reading.num_refused + (accepted < offered).astype(jnp.int32),
    )
    length = jnp.where(offered > 0, reading.read * thinking.chunk, cache.length)
    return state.replace(reading=reading, cache=cache.replace(length=length))


class Chunks(flax.struct.PyTreeNode):
    """The chunks of one pass, one to a window."""

    windows: Windows  # [G, C]
    depth: jax.Array  # [G] int32, how many chunks of the same row stand before it

    @property
    def used(self) -> jax.Array:
        """`[G]` bool, False for padding."""
        return self.windows.row != NO_ROW


def next_chunks(state: GenState, groups: int) -> Chunks:
    """The chunks that a pass of `groups` windows reads next: the first of each row, then the second of each, ...

    rows with 3, 0 and 2 unread chunks, groups 4:    row 0 2 0 2    depth 0 0 1 1
    """
    reading = state.reading
    assert reading is not None
    B, C = state.committed.shape[0], reading.chunk
    unread = jnp.where(state.live, jnp.maximum(reading.end - reading.read, 0), 0)
    exists = jnp.arange(groups, dtype=jnp.int32)[:, None] < unread[None, :]  # [depth, B]
    (index,) = jnp.nonzero(exists.reshape(-1), size=groups, fill_value=-1)
    index = index.astype(jnp.int32)
    used, row, depth = index >= 0, jnp.maximum(index, 0) % B, jnp.maximum(index, 0) // B
    start = jnp.where(used, (reading.read[row] + depth) * C, 0)
    return Chunks(
        windows=Windows(
            tokens=state.tokens[row[:, None], start[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]],
            row=jnp.where(used, row, NO_ROW),
            start=start,
            count=jnp.where(used, C, 0).astype(jnp.int32),
        ),
        depth=jnp.where(used, depth, 0),
    )


def _before_refused(chunks: Chunks, refused: jax.Array, max_requests: int) -> jax.Array:
    """How many chunks of each row stand before its first `refused [G]` one, `[B]` int32; `G` if there is none.

    row 0 2 0 2    depth 0 0 1 1    refused n y y y    ->  1 4 0
    """
    G = refused.shape[0]
    row = jnp.where(chunks.used & refused, chunks.windows.row, max_requests)
    return jnp.full(max_requests, G, jnp.int32).at[row].min(chunks.depth, mode="drop")
