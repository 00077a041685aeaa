"""Values that chips exchange inside of one `jax.shard_map`: finished ones, by copies; floats are never added across chips.

Every function is the identity where a program runs on one chip. A chip is named by its place on the axes `CHIPS`, in row-major
order: on 2 x 2 chips, ("kv", "query") = (1, 0) is chip 2.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")
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


def own(x: jax.Array | np.ndarray, axes: tuple[str, ...] = CHIPS) -> jax.Array:
    """This chip's part of the last axis of `x [..., m]`, which all chips hold: `[..., m/n]`, `n` chips along `axes`."""
    x = jnp.asarray(x)
    if num_chips() == 1:
        return x
    size = x.shape[-1] // math.prod(jax.lax.axis_size(axis) for axis in axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=-1)


def gather(x: jax.Array, axes: tuple[str, ...] = CHIPS) -> jax.Array:
    """The parts `x [..., m/n]` of the chips along `axes` one after the other: `[..., m]`, on each of them."""
    return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) if num_chips() > 1 else x


def to_rows(x: jax.Array) -> jax.Array:
    """From `x [R, m/n]`, this chip's columns of all rows, whole rows that are this chip's share: `[r, m]`, `r = ceil(R / n)`.

    R 3, two chips:    chip 0 takes rows 0 and 1, chip 1 takes row 2 and a row of zeros
    """
    n = num_chips()
    if n == 1:
        return x
    padded = jnp.pad(x, ((0, -x.shape[0] % n), (0, 0)))
    return jax.lax.all_to_all(padded, CHIPS, split_axis=0, concat_axis=1, tiled=True)


def share_rows(fn: Callable[..., Tree], logits_f32: jax.Array, *by_row: Any, texts_fn: Callable[[], jax.Array]) -> Tree:
    """`fn(logits_f32, *by_row, texts_fn)` for `R` rows, of which each chip takes its share; all get what each found.

    Args:
        fn: no row of what it returns, arrays `[R, ...]`, depends on another row.
        logits_f32: `[r, V]`, this chip's share as `to_rows` gives it.
        by_row: pytrees of arrays `[R, ...]` that all chips hold; `fn` gets their rows.
        texts_fn: makes texts `[X, T]`, of which each is that of `R / X` rows; `fn` gets one that makes the texts of its rows.
    """
    if num_chips() == 1:
        return fn(logits_f32, *by_row, texts_fn)
    R = jax.tree.leaves(by_row)[0].shape[0]
    r = logits_f32.shape[0]
    row = jnp.minimum(chip() * r + jnp.arange(r, dtype=jnp.int32), R - 1)

    def own_texts() -> jax.Array:
        texts = texts_fn()
        return texts[row // (R // texts.shape[0])]

    found = fn(logits_f32, *jax.tree.map(lambda x: x[row], by_row), own_texts)
    return jax.tree.map(lambda x: _gather_bits(x)[:R], found)


def _gather_bits(x: jax.Array) -> jax.Array:
    """The rows `x [r, ...]` of all chips one after the other, as bit patterns.

    TPUs' compiler turns the gather of a short vector into a sum with zeros of the other chips, and -0.0 + 0.0 is 0.0.
    """
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if is_float else x
    gathered = jax.lax.all_gather(bits, CHIPS, axis=0, tiled=True)
    return jax.lax.bitcast_convert_type(gathered, x.dtype) if is_float else gathered


def select(x: jax.Array, mine: jax.Array) -> jax.Array:
    """Each row of `x [R, D]` as the one chip has it whose `mine [R]` is true: sums of bit patterns, which have no order."""
    if num_chips() == 1:
        return x
    pattern = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, pattern).astype(jnp.uint32)
    bits = jax.lax.psum(jnp.where(mine[:, None], bits, jnp.zeros_like(bits)), CHIPS)
    return jax.lax.bitcast_convert_type(bits.astype(pattern), x.dtype)
