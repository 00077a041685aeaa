"""Tiles of queries, as the kernels of GPUs and TPUs cut them: their positions, and the sum of their splits."""

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

from detspec.ops.attention.reference import MASK_VALUE

NO_POSITION = -1  # position of queries that need no attention: a window that only pads the pass


def tile_positions(positions: jax.Array, tiles: int, width: int) -> jax.Array:
    """Cuts `positions [G, W]` into `tiles` of `width` a window: `[G * tiles, width]`.

    Tiles that only repeat the last position of a partial window need no attention. Two tiles of 2:

        4 5 6 7   ->  4 5, 6 7
        4 5 5 5   ->  4 5, NO_POSITION NO_POSITION
    """
    G, W = positions.shape
    positions = jnp.pad(positions, ((0, 0), (0, tiles * width - W)), mode="edge").reshape(G, tiles, width)
    if tiles > 1:
        repeats = positions[:, 1:, 0] == positions[:, :-1, -1]
        repeats = jnp.pad(repeats, ((0, 0), (1, 0)))
        positions = jnp.where(repeats[:, :, None], NO_POSITION, positions)
    return positions.reshape(G * tiles, width)


def put_together(works: jax.Array, attended: jax.Array, lse: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Adds up the splits of each tile: `[X, K, rows, H]`, zeros for a tile of which no split `works [X, splits]`.

    `attended [X, splits, K, rows, H]` is normalised within each split, `lse [X, splits, K, rows]` is the logarithm of each
    row's sum of exponentials, None where it is not known; that of all splits, `[X, K, rows]`, is returned too. Memory of splits
    that do not work may hold anything.

    The sums are written out, so that XLA makes one kernel of them and of what follows; as reductions they were three.
    """
    parts = [jnp.where(works[:, s, None, None, None], attended[:, s], 0.0) for s in range(works.shape[1])]
    if lse is None:
        return parts[0], None
    tops = [jnp.where(works[:, s, None, None], lse[:, s], MASK_VALUE) for s in range(works.shape[1])]
    top = reduce(jnp.maximum, tops)
    if len(parts) == 1:
        return parts[0], top
    weights = [jnp.exp(each - top) for each in tops]  # 0 for a split without work, if another one works
    total = reduce(add, weights)
    whole = reduce(add, (part * (weight / total)[..., None] for part, weight in zip(parts, weights, strict=True)))
    return whole, top + jnp.log(total)


def by_position(x: jax.Array, shape: tuple[int, ...], tiles: int) -> jax.Array:
    """Results of tiles, `x [G * tiles, K, width * Q, m]`, in the order of queries of `shape [G, W, N, H]`: `[G, W, N, m]`."""
    G, W, N, _ = shape
    _, K, rows, m = x.shape
    Q = N // K
    x = x.reshape(G, tiles, K, rows // Q, Q, m).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(G, tiles * rows // Q, N, m)[:, :W]
