"""Rows of tables and pages of caches on CPUs, moved in place by kernels in C (`native/rows.c`).

XLA:CPU has no bfloat16 of its own: to write a few elements of an array, or to look them up, it converts all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import KV, Int8Pages, numbers
from detspec.native.library import kernel


def append(pools: KV, k: jax.Array, v: jax.Array, page_ids: jax.Array, slots: jax.Array, *, key_slot_axis: int) -> KV:
    """See `attention.api.append_fn`."""
    dtype = jnp.dtype(numbers(pools.v).dtype)
    found = [jax.ShapeDtypeStruct(numbers(pages).shape, dtype) for pages in pools]
    call = kernel("detspec_append", dtype, found, in_place={0: 0, 1: 1})
    return KV(*call(*pools, k.astype(dtype), v.astype(dtype), page_ids, slots, key_slot_axis=np.int32(key_slot_axis)))


def append_int8(pages: Int8Pages, new: jax.Array, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2) -> Int8Pages:
    """See `attention.int8_pages.append`, with the same bits."""
    found = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (pages.values, pages.scale)]
    call = kernel("detspec_append_int8", jnp.int8, found, in_place={0: 0, 1: 1})
    return Int8Pages(*call(pages.values, pages.scale, new, page_ids, slots, slot_axis=np.int32(slot_axis)))


def copy_pages(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Pages `source [n]` of `pages [num_pages, ...]` over pages `target [n]`; no target may be a source of another page."""
    result = jax.ShapeDtypeStruct(pages.shape, jnp.dtype(pages.dtype))
    return kernel("detspec_copy", pages.dtype, result, in_place={0: 0})(pages, source, target)


def take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """`table[rows]` for `table [V, D]` and `rows [R]` int32; a row outside of the table is its nearest one."""
    taken = jax.ShapeDtypeStruct((rows.shape[0], table.shape[1]), table.dtype)
    return kernel("detspec_take", table.dtype, taken)(table, rows)
