"""Pages and slots of a pass's token rows in a cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import SCRATCH_PAGE, KVCache
from detspec.ops.attention.api import NO_POSITION
from detspec.schedule import Numerics
from detspec.state import Windows


class Places(NamedTuple):
    """Pages and slots of a pass's token rows in a cache."""

    tables: jax.Array  # [G, max_pages] int32, pages of each window's sequence
    page_ids: jax.Array  # [R] int32, page of each row, SCRATCH_PAGE for padding
    slots: jax.Array  # [R] int32, slot in it
    looking_from: jax.Array  # [G, W] int32, positions, NO_POSITION in windows that need no attention
    seats: jax.Array | None  # [G] int32, the seat of each window's sequence, -1, the scratch seat, for padding; see `KVCache`

    def for_windows(self, wanted: jax.Array) -> "Places":
        """Returns these places with attention in windows `wanted [G]` only."""
        return self._replace(looking_from=jnp.where(wanted[:, None], self.looking_from, NO_POSITION))


def place(windows: Windows, cache: KVCache, page: int) -> Places:
    """The places of `windows` in `cache`, whose pages have `page` slots."""
    max_pages = cache.page_table.shape[1]
    positions = windows.positions
    in_use = windows.sequence[:, None] >= 0
    sequence = jnp.maximum(windows.sequence, 0)
    tables = jnp.where(in_use, cache.page_table[sequence], SCRATCH_PAGE)
    pages = jnp.take_along_axis(tables, jnp.minimum(positions // page, max_pages - 1), axis=1)
    return Places(
        tables=tables,
        page_ids=jnp.where(windows.used, pages, SCRATCH_PAGE).reshape(-1),
        slots=(positions % page).reshape(-1),
        looking_from=jnp.where(windows.count[:, None] > 0, positions, NO_POSITION),
        seats=None if cache.seat is None else jnp.where(in_use[:, 0], cache.seat[sequence], -1),
    )


class Where(NamedTuple):
    """Facts of a pass that a mixer gets together with its rows."""

    windows: Windows  # `tokens [G, W]`; the rows of the pass are those of the windows, one after the other
    places: Places
    prepared: Any  # result of the mixer's `prepare` for the positions `[R]`
    numerics: Numerics
