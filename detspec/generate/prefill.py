"""Catching up: writes the keys and values of all committed tokens but the last, through the canonical pass.

The last committed token is left to the next window, whose first target is the next token: a prompt of one token needs no
prefill, and a preempted row is replayed by the same function.
"""

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig, Schedule
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.state import NO_ROW, GenState, Windows


def prefill(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Brings every live row to `cache.length == committed - 1`.

    The missing stretches of all rows are cut into windows of `W` and packed `G` to a pass, several windows of one row in one
    pass if need be. Rows of 5 and 9 missing tokens with `W = 4`, `G = 4`:

        row 0: [0 4) [4 5)    row 1: [0 4) [4 8) [8 9)    passes: (0,0,1,1) (1,-,-,-)
    """
    W, G = schedule.window, schedule.groups
    length, target = state.cache.length, state.committed - 1
    start = length - length % W if schedule.alignment == "window" else length
    missing = jnp.where(state.live & (length < target), target - start, 0)
    windows_through = jnp.cumsum(-(-missing // W))  # [B], windows of rows 0 .. b
    total = windows_through[-1]
    offset = jnp.arange(W, dtype=jnp.int32)

    def run_pass(carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        done, cache = carry
        index = done + jnp.arange(G, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(windows_through, index, side="right"), length.shape[0] - 1).astype(jnp.int32)
        place_in_row = index - (windows_through[row] - -(-missing[row] // W))
        first = start[row] + place_in_row * W
        count = jnp.where(index < total, jnp.clip(target[row] - first, 0, W), 0)
        place = jnp.minimum(first[:, None] + offset[None, :], state.tokens.shape[1] - 1)
        windows = Windows(
            tokens=jnp.where(index[:, None] < total, state.tokens[row[:, None], place], 0),
            row=jnp.where(index < total, row, NO_ROW),
            start=jnp.where(index < total, first, 0),
            count=count,
        )
        _, cache = forward(params, cfg, windows, cache, schedule=schedule)
        return done + G, cache

    with jax.named_scope("prefill"):
        _, cache = jax.lax.while_loop(lambda carry: carry[0] < total, run_pass, (jnp.int32(0), state.cache))
    return state.replace(cache=cache.replace(length=jnp.where(state.live, jnp.maximum(length, target), length)))
