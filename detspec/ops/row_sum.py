"""Sums over the last axis: in an order that this axis alone decides, or in an order of XLA's choice.

XLA chooses the reduction order of `x.sum(-1)` by the whole shape: on the CPU the same row gives other bits among 8 rows than
among 64. Halving by elementwise additions leaves no choice:

    [a b c d]  ->  [a+c b+d]  ->  [(a+c)+(b+d)]
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from detspec.schedule import Numerics

SumFn = Callable[[jax.Array], jax.Array]  # [..., n] -> [...]


def fixed_sum(x: jax.Array) -> jax.Array:
    """Sums `x [..., n]` over its last axis by a fixed tree of pairwise additions."""
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    if size != n:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - n)])
    while size > 1:
        size //= 2
        x = jax.lax.slice_in_dim(x, 0, size, axis=-1) + jax.lax.slice_in_dim(x, size, 2 * size, axis=-1)
    return jax.lax.squeeze(x, (x.ndim - 1,))


def native_sum(x: jax.Array) -> jax.Array:
    """Sums `x [..., n]` over its last axis in the backend's own order, which may depend on the other axes."""
    return x.sum(-1)


def sum_fn(numerics: Numerics) -> SumFn:
    """The sum that `numerics.reductions` names."""
    return {"fixed": fixed_sum, "native": native_sum}[numerics.reductions]


def first_largest(x: jax.Array) -> jax.Array:
    """`argmax` of `x [R, V]` over the last axis; V - 1 for a row with a nan. XLA:CPU vectorises its two reductions."""
    V = x.shape[1]
    index = jnp.arange(V, dtype=jnp.int32)[None, :]
    return jnp.where(x == x.max(-1, keepdims=True), index, V - 1).min(-1)
