"""Values that chips exchange inside of one `jax.shard_map`: finished ones, by copies; floats are never added across chips.

Every function is the identity where a program runs on one chip. A chip is named by its place on the axes `CHIPS`, in row-major
order: on 2 x 2 chips, ("kv", "query") = (1, 0) is chip 2.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

CHIPS = ("kv", "query")  # the axes of a mesh, see `detspec.mesh`


def num_chips() -> int:
    """`n`, the chips that the program being traced runs on."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in CHIPS if axis in mesh.manual_axes)


def kv_chips() -> int:
    """Among how many parts the KV heads are shared out."""
    return jax.sharding.get_abstract_mesh().shape["kv"] if num_chips() > 1 else 1


def chip() -> jax.Array:
    """The number of this chip among them, int32."""
    return jax.lax.axis_index(CHIPS) if num_chips() > 1 else jnp.int32(0)


def own(x: jax.Array | np.ndarray) -> jax.Array:
    """This chip's part of the last axis of `x [..., m]`, which all chips hold: `[..., m/n]`."""
    x = jnp.asarray(x)
    if num_chips() == 1:
        return x
    size = x.shape[-1] // num_chips()
    return jax.lax.dynamic_slice_in_dim(x, chip() * size, size, axis=-1)


def gather(x: jax.Array) -> jax.Array:
    """The parts `x [..., m/n]` of all chips one after the other: `[..., m]`, on each of them."""
    return jax.lax.all_gather(x, CHIPS, axis=x.ndim - 1, tiled=True) if num_chips() > 1 else x


def gather_rows(x: jax.Array, rows: int) -> jax.Array:
    """The rows `x [r, ...]` of all chips one after the other, the first `rows` of them, on each chip."""
    return jax.lax.all_gather(x, CHIPS, axis=0, tiled=True)[:rows] if num_chips() > 1 else x


def select(x: jax.Array, mine: jax.Array) -> jax.Array:
    """Each row of `x [R, D]` as the one chip has it whose `mine [R]` is true: sums of bit patterns, which have no order."""
    if num_chips() == 1:
        return x
    pattern = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, pattern).astype(jnp.uint32)
    bits = jax.lax.psum(jnp.where(mine[:, None], bits, jnp.zeros_like(bits)), CHIPS)
    return jax.lax.bitcast_convert_type(bits.astype(pattern), x.dtype)
