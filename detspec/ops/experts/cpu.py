"""Products with the weights of experts on CPUs, by the kernel of pinned products (`native/products.c`), with the same bits.

It sorts rows by their experts and multiplies them as a product for each expert, all in one call. Experts without rows are not
read, nothing is padded, and rows that are not used cost no time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from detspec.native.library import kernel
from detspec.ops.gate import number_of
from detspec.ops.linear.cpu import given
from detspec.ops.linear.int8 import QTensor


def experts_f32(x: jax.Array, ids: jax.Array, weights: Sequence[jax.Array], used: jax.Array | None = None) -> list[jax.Array]:
    """See `api.experts_fn`; `x [R, in]` or `[R, k, in]`, `ids [R, k]` -> `[R, k, out]` of each weight, any sizes."""
    found = [jax.ShapeDtypeStruct((*ids.shape, weight.shape[1]), jnp.float32) for weight in weights]
    return list(kernel("detspec_experts", x.dtype, found)(x, ids, *weights, *given(used)))


def gated_experts(
    x: jax.Array, ids: jax.Array, gate: jax.Array, up: jax.Array, activation: str, used: jax.Array | None = None
) -> jax.Array:
    """See `api.gated_experts_fn`; `x [R, in]`, `ids [R, k]` -> `[R, k, F]` in its dtype."""
    found = jax.ShapeDtypeStruct((*ids.shape, gate.shape[1]), x.dtype)
    return kernel("detspec_experts", x.dtype, found)(x, ids, gate, up, *given(used), **number_of(activation))


def int8_experts_f32(
    x: jax.Array, ids: jax.Array, weights: Sequence[QTensor], used: jax.Array | None = None
) -> list[jax.Array]:
    """As `experts_f32`, with the bits of `int8.linears_f32`."""
    found = [jax.ShapeDtypeStruct((*ids.shape, weight.values.shape[1]), jnp.float32) for weight in weights]
    leaves = [leaf for weight in weights for leaf in (weight.values, weight.scale)]
    return list(kernel("detspec_int8_experts", x.dtype, found)(x, ids, *leaves, *given(used)))
