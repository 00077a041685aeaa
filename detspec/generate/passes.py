"""Given text through canonical passes: cut into windows, packed `G` to a pass, several windows of one row in one pass.

Rows of 5 and 9 positions with `W = 4`, `G = 4`:

    row 0: [0 4) [4 5)    row 1: [0 4) [4 8) [8 9)    passes: (0,0,1,1) (1,-,-,-)
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from detspec.config import Schedule
from detspec.state import NO_ROW, Windows

Carry = TypeVar("Carry")


def run_passes(
    pass_fn: Callable[[Windows, Carry], Carry],
    carry: Carry,
    tokens: jax.Array,
    first: jax.Array,
    end: jax.Array,
    *,
    schedule: Schedule,
) -> Carry:
    """Calls `pass_fn(windows, carry)` under `lax.while_loop` until positions `first .. end - 1` of all rows have been fed.

    Args:
        pass_fn: one pass over windows of `schedule.groups` by `schedule.window`.
        carry: what the first pass gets; each next one gets what the last returned.
        tokens: `[B, T]` int32.
        first: `[B]` int32. With windows aligned it is moved down to the start of its window.
        end: `[B]` int32; a row with `end <= first` takes no part.
        schedule: its windows, groups and alignment.
    """
    W, G = schedule.window, schedule.groups
    start = first - first % W if schedule.alignment == "window" else first
    num_windows = jnp.where(first < end, -(-(end - start) // W), 0)  # [B]
    windows_through = jnp.cumsum(num_windows)  # of rows 0 .. b
    total = windows_through[-1]
    offset = jnp.arange(W, dtype=jnp.int32)

    def windows_from(done: jax.Array) -> Windows:
        index = done + jnp.arange(G, dtype=jnp.int32)
        used = index < total
        row = jnp.minimum(jnp.searchsorted(windows_through, index, side="right"), tokens.shape[0] - 1).astype(jnp.int32)
        begin = start[row] + (index - (windows_through[row] - num_windows[row])) * W
        place = jnp.minimum(begin[:, None] + offset[None, :], tokens.shape[1] - 1)
        return Windows(
            tokens=jnp.where(used[:, None], tokens[row[:, None], place], 0),
            row=jnp.where(used, row, NO_ROW),
            start=jnp.where(used, begin, 0),
            count=jnp.where(used, jnp.clip(end[row] - begin, 0, W), 0),
        )

    def run_pass(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        done, carry = state
        return done + G, pass_fn(windows_from(done), carry)

    _, carry = jax.lax.while_loop(lambda state: state[0] < total, run_pass, (jnp.int32(0), carry))
    return carry
