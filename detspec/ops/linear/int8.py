"""Weights rounded to int8 by row, and products with them: sums of integers, which are exact in any order.

    values[o, i] = round(127 / largest[o] * weight[o, i])        largest[o]: of the magnitudes in row o
    scale[o]     = largest[o] / 127                              weight[o, i] is about values[o, i] * scale[o]

    y[r, o] = (sum over i of x.values[r, i] * weight.values[o, i]) * x.scale[r] * weight.scale[o]

Rows of activations are rounded in the same way, each by itself. So a row of `y` has the same bits among any other rows, and
however the sum is cut into tiles, splits or chips. What is left in float32 are single operations in the order above.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from detspec.errors import InputError
from detspec.struct import Struct

MOST = 127  # -128 is not used: products of two values fit into 14 bits and a sign, sums of two of these into 16 bits
MAX_INPUTS = (2**31 - 1) // MOST**2  # inputs of a product whose sum int32 holds: 133,144
# Rows without a larger magnitude are taken for zeros. Then no scale and no product of two scales is subnormal: some processors
# round these to zero, some do not.
LEAST = 2.0**-50


class QTensor(Struct):
    """A matrix rounded to int8 by row, or several of them."""

    values: jax.Array  # [..., out, in] int8, -127 .. 127
    scale: jax.Array  # [..., out] float32, the step from one value of a row to the next; nan if the row was not finite


def quantize(x: jax.Array) -> QTensor:
    """`x [..., in]` of a float dtype, rounded by row; halves go to the even value. A row that is not finite gets scale nan."""
    # By bit pattern: XLA may leave out a rounding of x to two bytes if the result goes on in float32, depending on the program.
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    without_sign = unsigned.type(jnp.iinfo(unsigned).max >> 1)
    magnitudes_f32 = jax.lax.bitcast_convert_type(bits & without_sign, x.dtype).astype(jnp.float32)
    # The larger number has the larger bits, and nan the largest of all, which a maximum of floats may overlook.
    largest = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(magnitudes_f32, jnp.int32).max(-1), jnp.float32)
    finite = jnp.isfinite(largest)
    kept = finite & (largest >= LEAST)
    rounded = jnp.where(kept[..., None], jnp.round(magnitudes_f32 * (np.float32(MOST) / largest)[..., None]), 0)
    values = jnp.where(bits > without_sign, -rounded, rounded).astype(jnp.int8)
    # Not divided by 127: XLA may make that this product.
    scale = jnp.where(kept, largest * np.float32(1 / MOST), jnp.where(finite, 0, jnp.nan))
    return QTensor(values, scale)


def check_inputs(number: int) -> None:
    """Raises `InputError` if a product of `number` inputs might have a sum that int32 does not hold."""
    if number > MAX_INPUTS:
        raise InputError(f"products in int8 have at most {MAX_INPUTS} inputs, whose sum int32 holds; got {number}")


def sums(x_values: jax.Array, weight_values: jax.Array) -> jax.Array:
    """int32 `[..., out]`, the sums of the products of `x_values [..., in]` and `weight_values [out, in]`, int8; exact."""
    contracted = ((x_values.ndim - 1,), (1,)), ((), ())
    return jax.lax.dot_general(x_values, weight_values, contracted, preferred_element_type=jnp.int32)


def scaled_f32(sums: jax.Array, x_scale: jax.Array, weight_scale: jax.Array) -> jax.Array:
    """`sums [..., out]` times `x_scale [...]`, then times `weight_scale [out]`, in float32.

    The last product is with a power of two, so it is exact. XLA makes one multiply-add of a product and what is added to it, in
    some programs and not in others; that leaves out the rounding of a product, of which there is none here.
    """
    exponents = jax.lax.bitcast_convert_type(weight_scale, jnp.uint32) & np.uint32(0x7F800000)
    powers = jax.lax.bitcast_convert_type(exponents, jnp.float32)
    significands = jnp.where(weight_scale > 0, weight_scale / powers, weight_scale)
    ones = (1,) * x_scale.ndim
    y_f32 = sums.astype(jnp.float32) * x_scale[..., None] * significands.reshape(*ones, -1)
    return y_f32 * powers.reshape(*ones, -1)


def linears_f32(x: jax.Array, weights: Sequence[QTensor]) -> list[jax.Array]:
    """See `api.linears_fn`; `x [R, in]` of a float dtype -> float32 `[R, out]` of each weight."""
    rows = quantize(x)
    return [scaled_f32(sums(rows.values, weight.values), rows.scale, weight.scale) for weight in weights]
