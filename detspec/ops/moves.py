"""Rows of tables and pages of caches on CPUs, moved in place by kernels in C (`native/rows.c`).

XLA:CPU has no bfloat16 of its own: to write a few elements of an array, or to look them up, it converts all of it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import Int8Pages
from detspec.native.library import kernel


def append(pages: jax.Array, new: jax.Array, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2) -> jax.Array:
    """See `cache.append`."""
    call = _in_place("detspec_append", pages)
    return call(pages, new.astype(pages.dtype), page_ids, slots, slot_axis=np.int32(slot_axis))


def append_int8(pages: Int8Pages, new: jax.Array, page_ids: jax.Array, slots: jax.Array, *, slot_axis: int = 2) -> Int8Pages:
    """See `attention.int8_pages.append`, with the same bits."""
    found = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (pages.values, pages.scale)]
    call = kernel("detspec_append_int8", jnp.int8, found, in_place={0: 0, 1: 1})
    return Int8Pages(*call(pages.values, pages.scale, new, page_ids, slots, slot_axis=np.int32(slot_axis)))


def copy_pages(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Pages `source [n]` of `pages [num_pages, ...]` over pages `target [n]`; no target may be a source of another page."""
    return _in_place("detspec_copy", pages)(pages, source, target)


def take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """`table[rows]` for `table [V, D]` and `rows [R]` int32; a row outside of the table is its nearest one."""
    taken = jax.ShapeDtypeStruct((rows.shape[0], table.shape[1]), table.dtype)
    return kernel("detspec_take", table.dtype, taken)(table, rows)


def _in_place(function: str, pages: jax.Array) -> Callable[..., jax.Array]:
    """The call of a function that changes `pages`, its first argument, where they lie."""
    result = jax.ShapeDtypeStruct(pages.shape, jnp.dtype(pages.dtype))
    return kernel(function, pages.dtype, result, in_place={0: 0})
