"""Pinned products on CPUs, by a kernel in C that reads each weight once for all rows (`native/products.c`).

Products are added up one input after the other, in segments. So a row's sum has one order, whatever the number of rows, the
tiles or the threads are. Rows that are not used are left out, and cost no time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from detspec.native.library import kernel
from detspec.ops.gate import number_of
from detspec.ops.linear.int8 import QTensor


def linears_f32(x: jax.Array, weights: Sequence[jax.Array], used: jax.Array | None = None) -> list[jax.Array]:
    """See `api.linears_fn`; `x [R, in]` -> `[R, out]` of each weight, any sizes; float32, bfloat16 or float16."""
    found = [jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32) for weight in weights]
    return list(kernel("detspec_linear", x.dtype, found)(x, *weights, *given(used)))


def gated_linears(x: jax.Array, gate: jax.Array, up: jax.Array, activation: str, used: jax.Array | None = None) -> jax.Array:
    """See `api.gated_fn`; `x [R, in]` -> `[R, F]` in its dtype, with the bits of `linears_f32` and `gate.cpu_gated`."""
    found = jax.ShapeDtypeStruct((x.shape[0], gate.shape[0]), x.dtype)
    return kernel("detspec_linear", x.dtype, found)(x, gate, up, *given(used), **number_of(activation))


def int8_linears_f32(x: jax.Array, weights: Sequence[QTensor], used: jax.Array | None = None) -> list[jax.Array]:
    """See `int8.linears_f32`, with the same bits; `x [R, in]` -> `[R, out]` of each weight."""
    found = [jax.ShapeDtypeStruct((x.shape[0], weight.values.shape[0]), jnp.float32) for weight in weights]
    leaves = [leaf for weight in weights for leaf in (weight.values, weight.scale)]
    return list(kernel("detspec_int8_linear", x.dtype, found)(x, *leaves, *given(used)))


def given(used: jax.Array | None) -> tuple[jax.Array, ...]:
    """The argument of a kernel that says which rows are used, if not all are."""
    return () if used is None else (used,)
