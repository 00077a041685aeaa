"""Pinned products on CPUs, by a kernel in C that reads each weight once for up to 64 rows (`ops/cpu/kernels.c`).

Lane l of 16 adds up every sixteenth product of a row, and a fixed tree adds the lanes. So a row's sum has one order, whatever
the number of rows, the tiles or the threads are.
"""

import jax
import jax.numpy as jnp

from detspec.errors import InputError
from detspec.ops.cpu.library import target_name

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def linear_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """See `api.linear_fn`; `x [R, in]` -> `[R, out]`, any sizes; float32, bfloat16 or float16."""
    if x.dtype not in DTYPES:
        raise InputError(f'x and weight of "cpu" products must be float32, bfloat16 or float16, got {x.dtype}')
    y = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(target_name("detspec_linear"), [y])(x, weight)[0]
