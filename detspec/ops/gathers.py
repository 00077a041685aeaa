"""Rows of tables and pages of caches, moved by XLA; `moves` has the CPU's kernels."""

import jax
import jax.numpy as jnp


def copy_pages(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Pages `source [n]` of `pages [num_pages, ...]` over pages `target [n]`; no target may be a source of another page."""
    return pages.at[target].set(pages[source])


def take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """`table[rows]` for `table [V, D]` and `rows [R]`; on the CPU by bit pattern where elements have two bytes.

    XLA:CPU converts a whole bf16 table to look up one row, and copies it once a program to look it up by bit pattern. For a
    TPU, that copies the whole table, too.
    """

    def by_pattern(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[rows], table.dtype)

    if table.dtype.itemsize != 2:
        return table[rows]
    return jax.lax.platform_dependent(table, rows, cpu=by_pattern, default=lambda table, rows: table[rows])
