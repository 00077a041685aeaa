"""Pinned products in plain jax.numpy: rows go through one product of one shape, a tile at a time.

    R = 70, TILE_ROWS = 32:     rows 0..31 | rows 32..63 | rows 64..69 and 26 rows of zeros

XLA orders the sums of a product by its shape, and all tiles have the same.
"""

import jax
import jax.numpy as jnp

TILE_ROWS = 32  # weights are read once a tile: few enough that one row is not dear, enough that 32 read them once


def linear_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """See `api.linear_fn`; `x [R, in]` -> `[R, out]`, any sizes and dtype."""
    rows = x.shape[0]
    tiles = -(-rows // TILE_ROWS)
    padded = jnp.pad(x, ((0, tiles * TILE_ROWS - rows), (0, 0))).reshape(tiles, TILE_ROWS, -1)

    def product(tile: jax.Array) -> jax.Array:
        return jnp.einsum("ri,oi->ro", tile, weight, preferred_element_type=jnp.float32)

    return jax.lax.map(product, padded).reshape(tiles * TILE_ROWS, -1)[:rows]
