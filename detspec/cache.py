"""The paged key/value cache: an immutable pytree. Setting the length back is the only way to roll back.

Worked example, page 4, one sequence of length 6 (two pages, allocated as 3 and 1):

    page_table[b] = [3 1]      position 5 lies in page_table[b, 5 // 4] = 1 at slot 5 % 4 = 1
    length[b]     = 6          positions 6 and later are stale: they are masked, never cleared

Page 0 is scratch: rows that pad a pass write there, and no result reads it.

Values are stored with the head dimension last. Keys are, too, if kernels read them. For the reference attention keys have
their slots last, so that its products, `[rows, H] @ [H, page]` and `[rows, page] @ [page, H]`, need no transposition.

In int8 each key and each value of a token and KV head is rounded by itself, and its scale lies in the same page and slot. So
what a slot holds depends on its own token alone, as it does in floats.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.schedule import Numerics
from detspec.struct import Struct

SCRATCH_PAGE = 0


class Int8Pages(Struct):
    """Pages of keys or values in int8: a number is about its value times the scale of its slot."""

    values: jax.Array  # int8, -127 .. 127; as pages of floats
    scale: jax.Array  # [num_pages, K, page] float32; nan for keys that are not finite


Pages = jax.Array | Int8Pages  # the pool of a layer's keys, or of its values


def numbers(pages: Pages) -> jax.Array:
    """What `pages` hold without scales, `[num_pages, K, page, H]` or `[num_pages, K, H, page]`."""
    return pages.values if isinstance(pages, Int8Pages) else pages


class KVCache(Struct):
    """Keys and values of all sequences, in pages of one pool per layer."""

    k: tuple[Pages, ...]  # L x [num_pages, K, page, H], or [num_pages, K, H, page] (`Numerics.key_slot_axis`)
    v: tuple[Pages, ...]  # L x [num_pages, K, page, H]
    page_table: jax.Array  # [B, max_pages] int32
    length: jax.Array  # [B] int32, number of valid slots

    @property
    def page(self) -> int:
        """Slots per page; a page is also the KV block of the canonical reduction."""
        return numbers(self.v[0]).shape[2]

    @property
    def num_pages(self) -> int:
        """Pages of a pool, the scratch page included."""
        return numbers(self.v[0]).shape[0]


def filled(shape: int | tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
    """A small array filled on the host: on the device, each shape would be a program to compile."""
    return jnp.asarray(np.full(shape, value, dtype))


def init_cache(
    cfg: ModelConfig, *, max_requests: int, max_len: int, numerics: Numerics, num_pages: int | None = None
) -> KVCache:
    """An empty cache of `max_requests` rows of `max_len` positions (rounded up to whole pages), for passes of `numerics`.

    By default every sequence has its own pages, in order. With `num_pages`, which does not count the scratch page, sequences
    have no pages, and the caller allocates them.
    """
    page = numerics.page
    max_pages = -(-max_len // page)
    table = np.zeros((max_requests, max_pages), np.int32)
    if num_pages is None:  # sequences own consecutive pages, one after the other
        table = 1 + np.arange(max_requests * max_pages, dtype=np.int32).reshape(max_requests, max_pages)
    num_pages = 1 + (max_requests * max_pages if num_pages is None else num_pages)
    head_dim = numerics.cache_head_dim(cfg.head_dim)
    values = (num_pages, cfg.num_kv_heads, page, head_dim)
    keys = values if numerics.key_slot_axis == 2 else (num_pages, cfg.num_kv_heads, head_dim, page)
    return KVCache(
        k=tuple(_empty_pages(keys, values[:3], numerics) for _ in range(cfg.num_layers)),
        v=tuple(_empty_pages(values, values[:3], numerics) for _ in range(cfg.num_layers)),
        page_table=jnp.asarray(table),
        length=filled(max_requests, 0, np.int32),
    )


def _empty_pages(shape: tuple[int, ...], scales: tuple[int, ...], numerics: Numerics) -> Pages:
    pages = jnp.zeros(shape, jnp.dtype(numerics.cache_dtype))
    return Int8Pages(pages, jnp.zeros(scales, jnp.float32)) if numerics.cache_dtype == "int8" else pages


def cache_bytes(cfg: ModelConfig, *, max_requests: int, max_len: int, numerics: Numerics, num_pages: int | None = None) -> int:
    """Bytes of keys and values that `init_cache` allocates for the same arguments, scales included."""
    num_pages = 1 + (max_requests * -(-max_len // numerics.page) if num_pages is None else num_pages)
    return 2 * cfg.num_layers * num_pages * numerics.page * cfg.num_kv_heads * slot_bytes(cfg.head_dim, numerics)


def slot_bytes(head_dim: int, numerics: Numerics) -> int:
    """Bytes of a key, or of a value, of one token and KV head, its scale included."""
    scale_bytes = 4 if numerics.cache_dtype == "int8" else 0
    return numerics.cache_head_dim(head_dim) * jnp.dtype(numerics.cache_dtype).itemsize + scale_bytes


def append(pages: jax.Array, new: jax.Array, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2) -> jax.Array:
    """Writes `new [R, K, H]` at `(page_ids [R], slots [R])` of `pages`, in place if they are donated.

    `pages` are `[num_pages, K, page, H]`, or `[num_pages, K, H, page]` if `slot_axis` is 3. If their `H` is larger than that
    of `new`, the rest is filled with zeros.
    """
    head_dim = pages.shape[5 - slot_axis]
    new = jnp.pad(new.astype(pages.dtype), ((0, 0), (0, 0), (0, head_dim - new.shape[2])))
    if slot_axis == 3:
        return pages.at[page_ids, :, :, slots].set(new, mode="promise_in_bounds")
    # Written as rows of one matrix: for a scatter over more axes, XLA:TPU changes the layout and copies all pages.
    _, K, page, H = pages.shape
    head = jnp.arange(K, dtype=jnp.int32)[None, :]
    rows = ((page_ids[:, None] * K + head) * page + slots[:, None]).reshape(-1)
    written = pages.reshape(-1, H).at[rows].set(new.reshape(-1, H), mode="promise_in_bounds")
    return written.reshape(pages.shape)
