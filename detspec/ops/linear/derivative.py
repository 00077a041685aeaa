"""Derivatives of products whose kernels have none: with one weight for all rows, and with the weights of experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from detspec.ops.experts import xla as xla_experts
from detspec.ops.master import Master

# (x, weights, ...) -> float32 products; see `linear.api.linears_fn` and `experts.api.experts_fn`
ProductsFn = Callable[..., tuple[jax.Array, ...]]


def linears_with_derivative(linears_f32: ProductsFn) -> ProductsFn:
    """`linears_f32` of masters, `x [..., in]` and `[out, in]`, with derivatives: sums of float32 products in XLA's order.

    That of `x` is added up in the order of the weights, and rounded to the dtype of `x` like any value of the stream.
    """

    @jax.custom_vjp
    def products(x: jax.Array, *weights: Master) -> tuple[jax.Array, ...]:
        return linears_f32(x, *(weight.rounded for weight in weights))

    def forward(x: jax.Array, *weights: Master) -> tuple[tuple[jax.Array, ...], Any]:
        return products(x, *weights), (x, [weight.rounded for weight in weights], [weight.like for weight in weights])

    def backward(given: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        x, rounded, like = given
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        of_x = jnp.zeros_like(rows)
        of_weights = []
        for matrix, cotangent, full in zip(rounded, cotangents, like, strict=True):
            by_row = cotangent.reshape(-1, matrix.shape[0])
            of_x = of_x + by_row @ matrix.astype(jnp.float32)
            of_weights.append(Master.cotangent(matrix, jnp.einsum("ro,ri->oi", by_row, rows).astype(full.dtype)))
        return (of_x.reshape(x.shape).astype(x.dtype), *of_weights)

    products.defvjp(forward, backward)
    return products


def experts_with_derivative(experts_f32: ProductsFn) -> ProductsFn:
    """`experts_f32` of masters `[E, out, in]`, with derivatives: XLA's products of all rows with each expert."""

    @jax.custom_vjp
    def products(x: jax.Array, ids: jax.Array, *weights: Master) -> tuple[jax.Array, ...]:
        return experts_f32(x, ids, *(weight.rounded for weight in weights))

    def forward(x: jax.Array, ids: jax.Array, *weights: Master) -> tuple[tuple[jax.Array, ...], Any]:
        residuals = x, ids, [weight.rounded for weight in weights], [weight.like for weight in weights]
        return products(x, ids, *weights), residuals

    def backward(given: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        x, ids, rounded, like = given

        def ordinary(x_f32: jax.Array, full: list[jax.Array]) -> tuple[jax.Array, ...]:
            rows = x_f32.reshape(-1, x.shape[-1]) if x.ndim == ids.ndim else x_f32.reshape(-1, *x.shape[-2:])
            found = xla_experts.experts_f32(rows, ids.reshape(-1, ids.shape[-1]), full)
            return tuple(y_f32.reshape(*ids.shape, y_f32.shape[-1]) for y_f32 in found)

        in_float32 = [matrix.astype(jnp.float32) for matrix in rounded]
        of_x, of_weights = jax.vjp(ordinary, x.astype(jnp.float32), in_float32)[1](tuple(cotangents))
        masters = [
            Master.cotangent(matrix, of.astype(full.dtype)) for matrix, of, full in zip(rounded, of_weights, like, strict=True)
        ]
        return (of_x.astype(x.dtype), None, *masters)

    products.defvjp(forward, backward)
    return products
