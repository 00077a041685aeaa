"""Sums over the last axis: in an order that this axis alone decides, or in an order of XLA's choice.

XLA chooses the reduction order of `x.sum(-1)` by the whole shape: on the CPU the same row gives other bits among 8 rows than
among 64. Halving by elementwise additions leaves no choice:

    [a b c d]  ->  [a+c b+d]  ->  [(a+c)+(b+d)]
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from detspec.native.library import kernel
from detspec.schedule import Numerics

SumFn = Callable[..., jax.Array]  # (x [..., n], or two of which it sums the products) -> [...]
BLOCK = 128


def fixed_sum(x: jax.Array, *by: jax.Array) -> jax.Array:
    """Sums `x [..., n]`, times what it is multiplied `by`, over its last axis by a fixed tree of pairwise additions."""
    return _halved(_product(x, *by), jnp.add, 0.0)


def _product(x: jax.Array, *by: jax.Array) -> jax.Array:
    for factor in by:
        x = x * factor
    return x


def elementwise_max(x: jax.Array) -> jax.Array:
    """The maximum of `x [..., n]` over its last axis, without a reduction, which XLA may compute together with what follows."""
    return _halved(x, jnp.maximum, -jnp.inf)


def _halved(x: jax.Array, combine_fn: Callable[[jax.Array, jax.Array], jax.Array], neutral: float) -> jax.Array:
    size = 1 << (x.shape[-1] - 1).bit_length()
    while size > 1:
        size //= 2
        upper = jax.lax.slice_in_dim(x, size, None, axis=-1)
        if upper.shape[-1] < size:  # the first time; padding all of `x` would let every read ask where it is
            upper = jnp.pad(upper, [(0, 0)] * (x.ndim - 1) + [(0, size - upper.shape[-1])], constant_values=neutral)
        x = combine_fn(jax.lax.slice_in_dim(x, 0, size, axis=-1), upper)
    return jax.lax.squeeze(x, (x.ndim - 1,))


def native_sum(x: jax.Array, *by: jax.Array) -> jax.Array:
    """As `fixed_sum` in the backend's own order, which may depend on the other axes."""
    return _product(x, *by).sum(-1)


def cpu_sum(x: jax.Array, *by: jax.Array, cache_dtype: str) -> jax.Array:
    """As `fixed_sum`, of float32 by a kernel in C, in an order of its own; the kernels for `cache_dtype` have it, too."""
    rows = [each.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for each in (x, *by)]
    call = kernel("detspec_sum", cache_dtype, jax.ShapeDtypeStruct(rows[0].shape[:1], jnp.float32))
    return call(*rows).reshape(x.shape[:-1])


def sum_fn(numerics: Numerics) -> SumFn:
    """The sum that `numerics.reductions` names; "fixed" runs by `numerics.implementation` where that has one."""
    if numerics.reductions == "fixed" and numerics.implementation == "cpu":
        return partial(cpu_sum, cache_dtype=numerics.cache_dtype)
    return {"fixed": fixed_sum, "native": native_sum}[numerics.reductions]


def with_derivative(sum_row: SumFn) -> SumFn:
    """`sum_row` with the derivative of any sum: each term has that of its sum."""

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def total(x: jax.Array, n: int) -> jax.Array:
        return sum_row(x)

    def backward(n: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
        return (jnp.broadcast_to(cotangent[..., None], (*cotangent.shape, n)),)

    total.defvjp(lambda x, n: (sum_row(x), None), backward)
    return lambda x, *by: total(_product(x, *by), x.shape[-1])


def first_largest(x: jax.Array) -> jax.Array:
    """`argmax` of `x [R, V]`, floats or int32, over the last axis, int32; V - 1 for a row with a nan.

    First the block of 128 that holds the maximum, then the place in it: XLA:CPU finds largest values fast, and places slowly.
    """
    R, V = x.shape
    blocks = -(-V // BLOCK)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    x = jnp.pad(x, ((0, 0), (0, blocks * BLOCK - V)), constant_values=lowest).reshape(R, blocks, BLOCK)
    of_blocks = x.max(-1)
    largest = of_blocks.max(-1, keepdims=True)
    block = _first(of_blocks == largest)
    place = _first(jnp.take_along_axis(x, block[:, None, None], axis=1)[:, 0] == largest)
    return jnp.minimum(block * BLOCK + place, V - 1)


def _first(found: jax.Array) -> jax.Array:
    """The first place of each row of `found [R, n]` that is true; n - 1 if none is."""
    n = found.shape[1]
    return jnp.where(found, jnp.arange(n, dtype=jnp.int32)[None, :], n - 1).min(-1)
