"""Committed text through canonical passes: cut into windows, packed `G` to a pass, also several of one sequence.

Sequences of 5 and 9 positions with `W = 4`, `G = 4`:

    sequence 0: [0 4) [4 5)    sequence 1: [0 4) [4 8) [8 9)    passes: (0,0,1,1) (1,-,-,-)
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from detspec.schedule import Schedule
from detspec.state import NO_SEQUENCE, GenState, Windows
from detspec.struct import Struct

Carry = TypeVar("Carry")


class Spans(Struct):
    """Positions `start .. end - 1` of sequences that passes are to read, none where `end <= start`; in the order of reading."""

    sequence: jax.Array  # [B] int32, each once
    start: jax.Array  # [B] int32
    end: jax.Array  # [B] int32

    def num_windows(self, window: int) -> jax.Array:
        """How many windows each span is cut into, `[B]` int32."""
        return -(-jnp.maximum(self.end - self.start, 0) // window)

    def with_first(self, wanted: jax.Array) -> "Spans":
        """Reorders the spans: first those where `wanted [B]` bool holds."""
        order = those_first(wanted)
        return jax.tree.map(lambda x: x[order], self)


def spans(first: jax.Array, end: jax.Array, schedule: Schedule) -> Spans:
    """Positions `first .. end - 1` of sequences `0 .. B - 1`; aligned windows begin where the window of `first` does."""
    start = first - first % schedule.budget.window if schedule.numerics.alignment == "window" else first
    number = jnp.arange(end.shape[0], dtype=jnp.int32)
    return Spans(sequence=number, start=jnp.where(first < end, start, end), end=end)


def missing(state: GenState, schedule: Schedule) -> Spans:
    """Spans that live sequences lack in the cache: all committed tokens but the last; empty while they still think."""
    length = state.cache.length
    return spans(length, jnp.where(state.catching_up, state.committed - 1, 0), schedule)


def cut(spans: Spans, index: jax.Array, tokens: jax.Array, window: int) -> Windows:
    """Windows number `index [G]` of all that `spans` of `tokens [B, T]` are cut into; padding where there is none."""
    number = spans.num_windows(window)
    through = jnp.cumsum(number)  # windows of spans 0 .. s
    used = index < through[-1]
    before = jnp.searchsorted(through, index, side="right", method="compare_all")  # spans; compared all, it is no loop
    span = jnp.minimum(before, through.shape[0] - 1)
    sequence = spans.sequence[span]
    begin = spans.start[span] + (index - (through[span] - number[span])) * window
    place = jnp.clip(begin[:, None] + jnp.arange(window, dtype=jnp.int32)[None, :], 0, tokens.shape[1] - 1)
    return Windows(
        tokens=jnp.where(used[:, None], tokens[sequence[:, None], place], 0),
        sequence=jnp.where(used, sequence, NO_SEQUENCE),
        start=jnp.where(used, begin, 0),
        count=jnp.where(used, jnp.clip(spans.end[span] - begin, 0, window), 0),
    )


def reached(spans: Spans, done: jax.Array, window: int) -> jax.Array:
    """Position that each span has reached after the first `done` windows of all, `[B]` int32; 0 if none was its own."""
    number = spans.num_windows(window)
    own_done = jnp.clip(done - (jnp.cumsum(number) - number), 0, number)
    return jnp.where(own_done > 0, jnp.minimum(spans.start + own_done * window, spans.end), 0)


def limited(spans: Spans, max_passes: jax.Array, schedule: Schedule) -> Spans:
    """Cuts `spans` down to the positions that their first `max_passes` passes read."""
    done = jnp.minimum(num_passes(spans, schedule), max_passes) * schedule.budget.groups
    return spans.replace(end=jnp.maximum(spans.start, reached(spans, done, schedule.budget.window)))


def num_passes(spans: Spans, schedule: Schedule) -> jax.Array:
    """How many passes read all `spans`, int32."""
    return -(-spans.num_windows(schedule.budget.window).sum(dtype=jnp.int32) // schedule.budget.groups)


def run_passes(
    pass_fn: Callable[[Windows, Carry], Carry], carry: Carry, tokens: jax.Array, spans: Spans, *, schedule: Schedule
) -> Carry:
    """Calls `pass_fn(windows, carry)` under `lax.while_loop` until all `spans` of `tokens [B, T]` int32 have been read.

    Windows are `schedule.budget.groups` by `schedule.budget.window`. Each pass gets the carry that the last one returned.
    """
    W = schedule.budget.window
    G = schedule.budget.groups
    end = num_passes(spans, schedule) * G

    def run_pass(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        done, carry = state
        windows = cut(spans, done + jnp.arange(G, dtype=jnp.int32), tokens, W)
        return done + G, pass_fn(windows, carry)

    return jax.lax.while_loop(lambda state: state[0] < end, run_pass, (jnp.int32(0), carry))[1]


def those_first(wanted: jax.Array) -> jax.Array:
    """All indices of `wanted [B]` bool, int32: first those where it holds. A sort would take longer to compile.

    wanted 0 1 0 1      place of each 2 0 3 1      indices 1 3 0 2
    """
    number = jnp.arange(wanted.shape[0], dtype=jnp.int32)
    above = jnp.cumsum(wanted, dtype=jnp.int32)
    place = jnp.where(wanted, above - 1, above[-1] + number - above)
    return jnp.zeros_like(number).at[place].set(number, unique_indices=True)
