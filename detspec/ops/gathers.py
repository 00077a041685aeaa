"""Rows of tables and pages of caches, moved by XLA; `moves` has the CPU's kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from detspec.ops.master import Master

TakeFn = Callable[[Any, jax.Array], jax.Array]  # (table [V, D] or its master, rows [...]) -> [..., D]


def copy_pages(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Pages `source [n]` of `pages [num_pages, ...]` over pages `target [n]`; no target may be a source of another page."""
    return pages.at[target].set(pages[source])


def rows_of(table: jax.Array, rows: jax.Array) -> jax.Array:
    """`table[rows]` for `table [V, D]` and `rows [...]`, differentiable; gradients of equal rows are added in any order."""
    return table[rows]


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


def take_with_derivative(take: TakeFn) -> TakeFn:
    """`take` of a master `[V, D]` at `rows [...]`, with its derivative: for each token the sum over its rows, in one order."""

    @jax.custom_vjp
    def looked_up(table: Master, rows: jax.Array) -> jax.Array:
        return take(table.rounded, rows.reshape(-1)).reshape(*rows.shape, -1)

    def backward(given: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array) -> tuple[Master, None]:
        rounded, like, rows = given
        by_row = cotangent.reshape(-1, rounded.shape[1]).astype(jnp.float32)
        of_full = sum_by_row(by_row, rows.reshape(-1), rounded.shape[0])
        return Master.cotangent(rounded, of_full.astype(like.dtype)), None

    looked_up.defvjp(lambda table, rows: (looked_up(table, rows), (table.rounded, table.like, rows)), backward)
    return looked_up


def sum_by_row(x: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    """`[size, D]`: in each row the sum of those of `x [R, D]` whose `rows [R]` name it, in one order on every platform.

    XLA:CPU adds in the order of `x`. Elsewhere threads would add in any order, so rows are sorted, and neighbours of one name
    are added by a tree:

        rows 2 0 2 2      sorted 0 2 2 2      sums up to each place a, b, b+c, (b+c)+d      the last of each name is kept
    """

    def in_order(x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.zeros((size, x.shape[1]), x.dtype).at[rows].add(x)

    return jax.lax.platform_dependent(x, rows, cpu=in_order, default=lambda x, rows: sum_neighbours(x, rows, size))


def sum_neighbours(x: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    """`sum_by_row` without additions into one place: no two threads write there."""
    order = jnp.argsort(rows, stable=True)
    names = rows[order]
    begins = jnp.concatenate([jnp.ones(1, bool), names[1:] != names[:-1]])

    def join(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(right[1][:, None], right[0], left[0] + right[0]), left[1] | right[1]

    sums, _ = jax.lax.associative_scan(join, (x[order], begins))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    targets = jnp.where(ends, names, size + jnp.arange(len(rows)))  # no two alike; those from `size` on are dropped
    return jnp.zeros((size, x.shape[1]), x.dtype).at[targets].set(sums, mode="drop", unique_indices=True)
