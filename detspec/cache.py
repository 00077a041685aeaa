"""The paged key/value cache: an immutable pytree. Setting the length back is the only way to roll back.

Worked example, page 4, one sequence of length 6 (two pages, allocated as 3 and 1):

    page_table[b] = [3 1]      position 5 lies in page_table[b, 5 // 4] = 1 at slot 5 % 4 = 1
    length[b]     = 6          positions 6 and later are stale: they are masked, never cleared

Page 0 is scratch: rows that pad a pass write there, and no result reads it.

Values are stored with the head dimension last. Keys are, too, if kernels read them. For the reference attention keys have
their slots last, so that its products, `[rows, H] @ [H, page]` and `[rows, page] @ [page, H]`, need no transposition.

In int8 each key and each value of a token and KV head is rounded by itself, and its scale lies in the same page and slot. So
what a slot holds depends on its own token alone, as it does in floats.

Layers that are no attention declare pools of their own. A recurrent layer keeps states in a ring, by seat:

    length    6         slots 4 and 5 lie in the second page of the ring of seat b, the state before slot 4 with them
    rollback  length 3  the state before slot 0 is still in the first page, so a rollback may reach back by one page
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.schedule import Numerics
from detspec.struct import Struct

SCRATCH_PAGE = 0


class Int8Pages(Struct):
    """Pages of keys or values in int8: a number is about its value times the scale of its slot."""

    values: jax.Array  # int8, -127 .. 127; as pages of floats
    scale: jax.Array  # [num_pages, K, page] float32; nan for keys that are not finite


Pages = jax.Array | Int8Pages  # the pool of a layer's keys, or of its values


def numbers(pages: Pages) -> jax.Array:
    """Values of `pages` without their scales, `[num_pages, K, page, H]` or `[num_pages, K, H, page]`."""
    return pages.values if isinstance(pages, Int8Pages) else pages


class KV(NamedTuple):
    """The pools of an attention layer."""

    k: Pages  # [num_pages, K, page, H], or [num_pages, K, H, page] (`Numerics.key_slot_axis`)
    v: Pages  # [num_pages, K, page, H]


class Pool(NamedTuple):
    """An array of a layer's cache, as the layer declares it: zeros at first, shared by all sequences, and never copied whole.

    Its first axis counts pages, which sequences find by the page table; or seats, of which each sequence has one, and the last
    is scratch. Its second axis counts heads, which chips share. Leaves of a declaration are pools, nested like the arrays.
    """

    shape: tuple[int, ...]
    dtype: Any
    slot_axis: int  # the axis of a page's slots
    by_seat: bool = False


class KVCache(Struct):
    """State that the layers keep of all sequences: a pytree of pools for each layer, and a page table that all share."""

    pools: tuple[Any, ...]  # L pytrees, `KV` of attention layers
    page_table: jax.Array  # [B, max_pages] int32
    length: jax.Array  # [B] int32, number of valid slots
    seat: jax.Array | None = None  # [B] int32, None if no layer keeps anything by seat

    @property
    def num_pages(self) -> int:
        """Pages of a pool, the scratch page included; 0 without attention layers."""
        return max((numbers(pools.v).shape[0] for pools in self.pools if isinstance(pools, KV)), default=0)


def filled(shape: int | tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
    """A small array filled on the host: on the device, each shape would be a program to compile."""
    return jax.device_put(np.full(shape, value, dtype))


def init_cache(
    cfg: ModelConfig, *, max_requests: int, max_len: int, numerics: Numerics, num_pages: int | None = None
) -> KVCache:
    """An empty cache of `max_requests` sequences of `max_len` positions (rounded up to whole pages), for passes of `numerics`.

    By default every sequence has its own pages, in order. With `num_pages`, which does not count the scratch page, sequences
    have no pages, and the caller allocates them.
    """
    max_pages = numerics.num_pages(max_len)
    table = np.zeros((max_requests, max_pages), np.int32)
    if num_pages is None:  # sequences own consecutive pages, one after the other
        num_pages = max_requests * max_pages
        table = 1 + np.arange(num_pages, dtype=np.int32).reshape(max_requests, max_pages)
    declared = cache_pools(cfg, numerics, num_pages=num_pages, max_requests=max_requests)
    has_seats = any(pool.by_seat for pool in _leaves(declared))
    return KVCache(
        pools=jax.tree.map(_zeros, declared, is_leaf=_is_pool),
        page_table=jax.device_put(table),
        length=filled(max_requests, 0, np.int32),
        seat=jax.device_put(np.arange(max_requests, dtype=np.int32)) if has_seats else None,
    )


def cache_pools(cfg: ModelConfig, numerics: Numerics, *, num_pages: int = 0, max_requests: int = 0) -> tuple[Any, ...]:
    """The pools that each layer declares, for `num_pages` pages and `max_requests` seats besides scratch."""
    of_kinds = [kind.mixer.pools(numerics, 1 + num_pages, max_requests + 1) for kind in cfg.kinds]
    return tuple(of_kinds[kind] for kind in cfg.pattern)


def map_pools(fn: Callable[..., Any], cfg: ModelConfig, numerics: Numerics, *pools: Any) -> tuple[Any, ...]:
    """`fn(declared, array, ...)` for each array of caches' `pools`; of `declared`, the shape means nothing."""
    return jax.tree.map(fn, cache_pools(cfg, numerics), *pools, is_leaf=_is_pool)


def shares_pages(cfg: ModelConfig, numerics: Numerics) -> bool:
    """Whether sequences that begin alike may share pages: not if a layer keeps something for each sequence apart."""
    return not any(pool.by_seat for pool in _leaves(cache_pools(cfg, numerics)))


def check_seats(cfg: ModelConfig, numerics: Numerics, num_drafts: int) -> None:
    """Raises `InputError` if layers that keep states by seat cannot be rolled back by `num_drafts` tokens.

    A ring holds the page of a position and the one before, so a rollback reaches no farther back than a page.
    """
    if shares_pages(cfg, numerics):
        return
    if num_drafts > numerics.page:
        raise InputError(
            f"the model has layers that keep states by sequence, which can be rolled back by a page of {numerics.page} tokens: "
            f"draft at most as many (num_speculative_tokens, or the window less one), not {num_drafts}, or raise Numerics.page"
        )
    if numerics.alignment != "free":
        raise InputError(
            f'layers that keep states by sequence need Numerics.alignment "free", got {numerics.alignment!r}: aligned windows '
            "would read positions again, whose state is gone"
        )


def cache_bytes(cfg: ModelConfig, *, max_requests: int, max_len: int, numerics: Numerics, num_pages: int | None = None) -> int:
    """Bytes of the pools that `init_cache` allocates for the same arguments."""
    num_pages = max_requests * numerics.num_pages(max_len) if num_pages is None else num_pages
    pools = _leaves(cache_pools(cfg, numerics, num_pages=num_pages, max_requests=max_requests))
    return sum(math.prod(pool.shape) * np.dtype(pool.dtype).itemsize for pool in pools)


def _zeros(pool: Pool) -> jax.Array:
    """The array of a pool; made on the device, by one program for each shape, which for a CPU takes longer than a copy."""
    zero = filled((), 0, pool.dtype)
    if jax.default_backend() == "cpu" and not isinstance(zero, jax.core.Tracer):
        return jax.device_put(np.zeros(pool.shape, pool.dtype))
    return jax.lax.broadcast(zero, pool.shape)


def _is_pool(node: Any) -> bool:
    return isinstance(node, Pool)


def _leaves(declared: Any) -> list[Pool]:
    return jax.tree.leaves(declared, is_leaf=_is_pool)


def kv_pools(num_kv_heads: int, head_dim: int, numerics: Numerics, num_pages: int) -> KV:
    """The pools of an attention layer with `num_kv_heads` keys and values of `head_dim` numbers a token."""
    page = numerics.page
    head_dim = numerics.cache_head_dim(head_dim)
    values = (num_pages, num_kv_heads, page, head_dim)
    keys = values if numerics.key_slot_axis == 2 else (num_pages, num_kv_heads, head_dim, page)
    dtype = jnp.dtype(numerics.cache_dtype)

    def pages(shape: tuple[int, ...], slot_axis: int) -> Any:
        numbers = Pool(shape, dtype, slot_axis)
        scale = Pool(values[:3], jnp.dtype(jnp.float32), 2)
        return Int8Pages(numbers, scale) if numerics.cache_dtype == "int8" else numbers  # type: ignore[arg-type]

    return KV(k=pages(keys, numerics.key_slot_axis), v=pages(values, 2))


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
