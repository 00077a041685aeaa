"""Reading a prompt by a model that thinks: draft thoughts, verify them, commit by index.

A pass reads up to `G` chunks, each with the states of the thought that is drafted for the chunk before it. `C = 4`, three
chunks of one sequence with drafts Z0' Z1' Z2':

    pass in    chunk 0 with 0    chunk 1 with states(Z0')    chunk 2 with states(Z1')
    pass out   Z0                Z1                          Z2

    all drafts right                   -> commit Z0 Z1 Z2                                  read 3, length 12
    Z0 = Z0', Z1 != Z1'                -> commit Z0 and the correction Z1; Z2 is void      read 2, length 8

Rollback is that smaller `read` and `length`. A pass commits at least one chunk of every sequence in it. With nothing but
trivial drafts this is the speculative prefill of Thinking States (section 3). It takes one round more than there are thoughts.
"""

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.riders.counters import Counters
from detspec.schedule import Schedule
from detspec.state import NO_SEQUENCE, GenState, Injected, Windows
from detspec.struct import Struct
from detspec.thinking.blocks import compress_if_any, think, thinking_of
from detspec.thinking.reading import reading_of


def think_prompt(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, max_passes: jax.Array | None = None
) -> GenState:
    """Reads the prompts of all live sequences that think, up to their last chunk, or as far as `max_passes` passes reach.

    Thoughts are drafted in its `Reading`. The windows of `schedule` do not matter, because the chunks take their place.
    """
    limit = jnp.int32(2**30) if max_passes is None else max_passes

    def unread(carry: tuple[jax.Array, GenState]) -> jax.Array:
        passes, state = carry
        return (passes < limit) & jnp.any(state.live & ~state.catching_up)

    def run_pass(carry: tuple[jax.Array, GenState]) -> tuple[jax.Array, GenState]:
        passes, state = carry
        return passes + 1, think_pass(params, cfg, state, schedule=schedule)

    with jax.named_scope("think"):
        return jax.lax.while_loop(unread, run_pass, (jnp.int32(0), state))[1]


def think_pass(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Runs a canonical pass over the next chunks of the sequences that are reading: verifies their drafts and commits."""
    reading = reading_of(state)
    thinking = thinking_of(cfg)
    B = state.committed.shape[0]
    chunks = next_chunks(state, schedule.budget.rows // thinking.chunk)
    sequence = jnp.maximum(chunks.windows.sequence, 0)
    place = reading.read[sequence] + chunks.depth

    # 1. What each chunk is given: the committed states for a sequence's first, those of the draft before it for the others.
    before = reading.thoughts[sequence, jnp.maximum(place - 1, 0)]
    assumes_draft = (chunks.depth > 0) & chunks.used
    assumed = compress_if_any(params, cfg, before, assumes_draft, numerics=schedule.numerics)
    states = jnp.where((chunks.depth == 0)[:, None, None], reading.states[sequence], assumed)

    # 2. The pass, and the thoughts after its chunks.
    _, cache, tapped = forward(
        params,
        cfg,
        chunks.windows,
        state.cache,
        numerics=schedule.numerics,
        riding=state.riding(chunks.windows)._replace(inject=Injected(thinking.in_layer, states)),
        tap_layer=thinking.out_layer,
    )
    assert tapped is not None
    drafted = reading.thoughts[sequence, place]

    def wanted(rejected: jax.Array) -> jax.Array:
        """Chunks that follow no wrong draft; the others are void."""
        return chunks.used & (chunks.depth <= _before_rejected(chunks, rejected, B)[sequence])

    thoughts = think(params, cfg, tapped, drafted, wanted, numerics=schedule.numerics)

    # 3. Commit each sequence's thoughts, up to and with the first whose draft was wrong.
    offered = jnp.zeros(B, jnp.int32).at[jnp.where(chunks.used, sequence, B)].add(1, mode="drop")
    accepted = jnp.minimum(_before_rejected(chunks, (thoughts != drafted).any(1), B), offered)
    gained = jnp.minimum(accepted + 1, offered)
    committed = chunks.used & (chunks.depth < gained[sequence])
    is_last = committed & (chunks.depth == gained[sequence] - 1)
    states = compress_if_any(params, cfg, thoughts, is_last, numerics=schedule.numerics)
    reading = reading.replace(
        thoughts=reading.thoughts.at[jnp.where(committed, sequence, B), place].set(thoughts, mode="drop"),
        read=reading.read + gained,
        states=reading.states.at[jnp.where(is_last, sequence, B)].set(states, mode="drop"),
    )
    length = jnp.where(offered > 0, reading.read * thinking.chunk, cache.length)
    counters = _count(state.counters, offered, accepted, gained)
    return state.replace(cache=cache.replace(length=length)).having(thoughts=reading, counters=counters)


class Chunks(Struct):
    """The chunks of one pass, one to a window."""

    windows: Windows  # [G, C]
    depth: jax.Array  # [G] int32, how many chunks of the same sequence stand before it

    @property
    def used(self) -> jax.Array:
        """`[G]` bool, False for padding."""
        return self.windows.sequence != NO_SEQUENCE


def next_chunks(state: GenState, groups: int) -> Chunks:
    """The chunks that a pass of `groups` windows reads next: the first of each sequence, then the second of each, ...

    sequences with 3, 0 and 2 unread chunks, groups 4:    sequence 0 2 0 2    depth 0 0 1 1
    """
    reading = reading_of(state)
    B = state.committed.shape[0]
    C = reading.chunk
    unread = jnp.where(state.live, jnp.maximum(reading.end - reading.read, 0), 0)
    exists = jnp.arange(groups, dtype=jnp.int32)[:, None] < unread[None, :]  # [depth, B]
    (index,) = jnp.nonzero(exists.reshape(-1), size=groups, fill_value=-1)
    index = index.astype(jnp.int32)
    used = index >= 0
    sequence = jnp.maximum(index, 0) % B
    depth = jnp.maximum(index, 0) // B
    start = jnp.where(used, (reading.read[sequence] + depth) * C, 0)
    return Chunks(
        windows=Windows(
            tokens=state.tokens[sequence[:, None], start[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]],
            sequence=jnp.where(used, sequence, NO_SEQUENCE),
            start=start,
            count=jnp.where(used, C, 0).astype(jnp.int32),
        ),
        depth=jnp.where(used, depth, 0),
    )


def _before_rejected(chunks: Chunks, rejected: jax.Array, num_sequences: int) -> jax.Array:
    """How many chunks of each sequence stand before its first `rejected [G]` one, `[B]` int32; `G` if there is none.

    sequence 0 2 0 2    depth 0 0 1 1    rejected n y y y    ->  1 4 0
    """
    G = rejected.shape[0]
    sequence = jnp.where(chunks.used & rejected, chunks.windows.sequence, num_sequences)
    return jnp.full(num_sequences, G, jnp.int32).at[sequence].min(chunks.depth, mode="drop")


def _count(counters: Counters, offered: jax.Array, accepted: jax.Array, gained: jax.Array) -> Counters:
    """`counters` after a pass that read `offered [B]` chunks and committed the thoughts after `gained [B]` of them."""
    return counters.add(
        num_read_passes=offered > 0,
        num_draft_thoughts=gained,
        num_accepted_thoughts=accepted,
        num_rejected_thoughts=accepted < offered,
    )
