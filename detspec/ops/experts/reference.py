"""Products with the weights of experts, by the products with one weight: for each choice of a row, or for each expert.

    ids    1 2     over pairs:    row 0 x expert 1 | row 0 x expert 2 | row 1 x expert 2 | row 1 x expert 0
           2 0     over experts:  both rows x expert 0 | both rows x expert 1 | both rows x expert 2, and each keeps its own

A product with one weight has the same bits in both ways, so the sizes decide: whichever reads fewer matrices. A loop takes one
matrix of the weights `[E, out, in]` at a time, so none of them is copied as a whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Linears = Callable[[jax.Array, Sequence[Any]], Sequence[jax.Array]]  # (x [R, in], weights [out, in]) -> float32 [R, out], ...


def experts_f32(linears_f32: Linears, x: jax.Array, ids: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
    """See `api.experts_fn`; `x [R, in]` or `[R, k, in]`, `ids [R, k]` -> `[R, k, out]` of each weight.

    The bits of a row of `linears_f32` must not depend on the rows next to it.
    """
    return (_over_pairs if ids.size <= _number(weights) else over_experts)(linears_f32, x, ids, weights)


def over_experts(linears_f32: Linears, x: jax.Array, ids: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
    """`experts_f32` by products of all rows with one expert after the other, of which each row keeps those of its own."""
    rows = x.reshape(-1, x.shape[-1])

    @jax.checkpoint  # for derivatives, whose masks of all results would be kept for each expert
    def meet(found: list[jax.Array], expert: tuple[jax.Array, list[Any]]) -> tuple[list[jax.Array], None]:
        products = linears_f32(rows, expert[1])
        mine = (ids == expert[0])[..., None]
        of_choices = [y_f32.reshape(ids.shape[0], -1, y_f32.shape[-1]) for y_f32 in products]
        return [jnp.where(mine, y_f32, kept) for y_f32, kept in zip(of_choices, found, strict=True)], None

    number = _number(weights)
    zeros = [jnp.zeros((*ids.shape, jax.tree.leaves(weight)[0].shape[1]), jnp.float32) for weight in weights]
    return jax.lax.scan(meet, zeros, (jnp.arange(number, dtype=ids.dtype), list(weights)))[0]


def _over_pairs(linears_f32: Linears, x: jax.Array, ids: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
    """`experts_f32` by the products of each choice of each row."""
    number = _number(weights)

    def product(pair: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        row, expert = pair
        of_expert = jax.tree.map(lambda leaf: leaf[jnp.clip(expert, 0, number - 1)], list(weights))
        there = (expert >= 0) & (expert < number)
        return [jnp.where(there, y_f32[0], 0) for y_f32 in linears_f32(row[None], of_expert)]

    each = jnp.broadcast_to(x.reshape(ids.shape[0], -1, x.shape[-1]), (*ids.shape, x.shape[-1]))
    found = jax.lax.map(product, (each.reshape(-1, x.shape[-1]), ids.reshape(-1)))
    return [y_f32.reshape(*ids.shape, -1) for y_f32 in found]


def _number(weights: Sequence[Any]) -> int:
    """`E`, how many experts there are."""
    return int(jax.tree.leaves(weights[0])[0].shape[0])
