"""Catching up: writes the keys and values of all committed tokens but the last, through the canonical pass.

The last committed token is left to the next window, whose first target is the next token: a prompt of one token needs no
prefill, and a preempted row is replayed by the same function.

The missing stretches of all rows are cut into windows of `W`, several windows of one row side by side if need be. Rows of 5
and 9 missing tokens with `W = 4`, `G = 4`:

    row 0: [0 4) [4 5)    row 1: [0 4) [4 8) [8 9)    passes: (0,0,1,1) (1,-,-,-)
"""

import flax.struct
import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig, Schedule
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.state import NO_ROW, GenState, Windows


class Stretches(flax.struct.PyTreeNode):
    """Positions `start .. end - 1` of each row that wait for the canonical pass, `end <= start` for none; `[B]` int32."""

    start: jax.Array
    end: jax.Array


def missing(state: GenState, schedule: Schedule) -> Stretches:
    """What live rows lack in the cache: committed tokens but the last."""
    length = state.cache.length
    start = length - length % schedule.window if schedule.alignment == "window" else length
    behind = state.live & ~state.ready
    return Stretches(start=start, end=jnp.where(behind, state.committed - 1, start))


def cut(stretches: Stretches, index: jax.Array, tokens: jax.Array, window: int) -> Windows:
    """Windows number `index [G]` of all that `stretches` of `tokens [B, max_len]` are cut into; padding where there is none."""
    through = _windows_through(stretches, window)
    used = (index >= 0) & (index < through[-1])
    row = jnp.minimum(jnp.searchsorted(through, index, side="right"), through.shape[0] - 1).astype(jnp.int32)
    before = through[row] - _num_windows(stretches, window)[row]
    first = stretches.start[row] + (index - before) * window
    place = jnp.clip(first[:, None] + jnp.arange(window, dtype=jnp.int32)[None, :], 0, tokens.shape[1] - 1)
    return Windows(
        tokens=jnp.where(used[:, None], tokens[row[:, None], place], 0),
        row=jnp.where(used, row, NO_ROW),
        start=jnp.where(used, first, 0),
        count=jnp.where(used, jnp.clip(stretches.end[row] - first, 0, window), 0),
    )


def num_windows(stretches: Stretches, window: int) -> jax.Array:
    """How many windows `stretches` are cut into, all rows together."""
    return _num_windows(stretches, window).sum(dtype=jnp.int32)


def caught_up(state: GenState, stretches: Stretches, done: jax.Array, window: int) -> jax.Array:
    """`cache.length [B]` after the first `done` windows of `stretches`."""
    number = _num_windows(stretches, window)
    done_of_row = jnp.clip(done - (_windows_through(stretches, window) - number), 0, number)
    reached = jnp.minimum(stretches.start + done_of_row * window, stretches.end)
    return jnp.where(done_of_row > 0, jnp.maximum(reached, state.cache.length), state.cache.length)


def prefill(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, max_passes: jax.Array | None = None
) -> GenState:
    """Brings every live row to `cache.length == committed - 1`, or as far as `max_passes` passes reach."""
    W, G = schedule.window, schedule.groups
    stretches = missing(state, schedule)
    total = num_windows(stretches, W)
    last = total if max_passes is None else jnp.minimum(total, max_passes * G)

    def run_pass(carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        done, cache = carry
        windows = cut(stretches, done + jnp.arange(G, dtype=jnp.int32), state.tokens, W)
        _, cache = forward(params, cfg, windows, cache, schedule=schedule)
        return done + G, cache

    with jax.named_scope("prefill"):
        done, cache = jax.lax.while_loop(lambda carry: carry[0] < last, run_pass, (jnp.int32(0), state.cache))
    return state.replace(cache=cache.replace(length=caught_up(state, stretches, done, W)))


def _num_windows(stretches: Stretches, window: int) -> jax.Array:
    return -(-jnp.maximum(stretches.end - stretches.start, 0) // window)


def _windows_through(stretches: Stretches, window: int) -> jax.Array:
    """Windows of rows 0 .. b, `[B]`."""
    return jnp.cumsum(_num_windows(stretches, window))
