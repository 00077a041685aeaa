"""Pinned products in plain jax.numpy: one product of one shape per tile of rows.

    R = 70, TILE_ROWS = 32:     rows 0..31 | rows 32..63 | rows 64..69 and 26 rows of zeros

XLA chooses the order of a product's sums by its shape, which is the same for all tiles.
"""

import jax
import jax.numpy as jnp

TILE_ROWS = 32  # weights are read once per tile: 32 rows share one reading, and padding one row to 32 costs little


def linear_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """See `api.linear_fn`; `x [R, in]` -> `[R, out]`, any sizes and dtype."""
    rows = x.shape[0]
    tiles = -(-rows // TILE_ROWS)
    padded = jnp.pad(x, ((0, tiles * TILE_ROWS - rows), (0, 0))).reshape(tiles, TILE_ROWS, -1)

    def product(tile: jax.Array) -> jax.Array:
        return jnp.einsum("ri,oi->ro", tile, weight, preferred_element_type=jnp.float32)

    return jax.lax.map(product, padded).reshape(tiles * TILE_ROWS, -1)[:rows]
