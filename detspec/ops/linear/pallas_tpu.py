"""Pinned products on TPUs (Mosaic, v4 and newer): weights stream through VMEM once for up to 256 rows.

1. The grid is (row blocks, out blocks, in blocks), the last one fastest and ascending. A float32 output block stays in VMEM
   while the products of its in blocks are added one after the other. Nothing is split.
2. A row block is one or two tiles of TILE_ROWS rows. The kernel makes one product per tile, all of one shape in one loop, so a
   second tile changes neither the shape nor the order of the first.
3. Edges: rows and outputs past the last are computed from undefined memory and never stored. No row or output reads another.
   Memory past the last input would reach sums, so the last in block is cut to the inputs that exist.

Why these sizes: 128 bf16 rows need 128 FLOP per byte of weights. Every TPU does more in the time of reading a byte (v5p 166,
v4 224, v5e 240, TPU7x 310, v6e 560), so padding a few decode rows to a tile costs no time. With two tiles per block of
weights a canonical pass of 256 rows reads weights once. Rows are read again for each block of 1024 outputs, a quarter more
traffic for 256 rows. Two buffers of all blocks take 7 MiB of VMEM in bfloat16, 12 in float32; every TPU gives a kernel 16.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from detspec.errors import InputError

TILE_ROWS = 128  # rows of one product
MAX_TILES = 2  # tiles that share one block of weights
BLOCKS = {jnp.dtype(jnp.bfloat16): (1024, 1024), jnp.dtype(jnp.float32): (1024, 512)}  # (out, in) of one block of weights


@partial(jax.jit, static_argnames=("interpret",))  # weights of one shape are lowered once
def linear_f32(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.linear_fn`; `x [R, in]`, any sizes, bfloat16 or float32 (multiplied in float32: precision HIGHEST)."""
    if x.dtype not in BLOCKS:
        raise InputError(f'x and weight of "pallas_tpu" products must be bfloat16 or float32, got {x.dtype}')
    R, num_in = x.shape
    num_out = weight.shape[0]
    block_out, block_in = BLOCKS[x.dtype]
    tiles = min(-(-R // TILE_ROWS), MAX_TILES)
    block_rows = tiles * TILE_ROWS
    in_blocks = -(-num_in // block_in)
    last_in = num_in - (in_blocks - 1) * block_in  # inputs of the last in block

    def kernel(x_ref, weight_ref, y_ref):  # type: ignore[no-untyped-def]
        step = pl.program_id(2)

        def add_products(size: int) -> None:
            def add_product(tile: jax.Array, _: None) -> None:
                rows = pl.ds(pl.multiple_of(tile * TILE_ROWS, TILE_ROWS), TILE_ROWS)
                y_ref[rows, :] += jax.lax.dot_general(
                    x_ref[rows, :size],
                    weight_ref[:, :size],
                    (((1,), (1,)), ((), ())),
                    precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                    preferred_element_type=jnp.float32,
                )

            jax.lax.fori_loop(0, tiles, add_product, None)

        @pl.when(step == 0)
        def _() -> None:
            y_ref[...] = jnp.zeros_like(y_ref)

        pl.when(step < in_blocks - 1)(lambda: add_products(block_in))
        pl.when(step == in_blocks - 1)(lambda: add_products(last_in))

    return pl.pallas_call(
        kernel,
        grid=(-(-R // block_rows), -(-num_out // block_out), in_blocks),
        in_specs=[
            pl.BlockSpec((block_rows, block_in), lambda row, out, step: (row, step)),
            pl.BlockSpec((block_out, block_in), lambda row, out, step: (out, step)),
        ],
        out_specs=pl.BlockSpec((block_rows, block_out), lambda row, out, step: (row, out)),
        out_shape=jax.ShapeDtypeStruct((R, num_out), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * R * num_in * num_out, bytes_accessed=x.nbytes + weight.nbytes + 4 * R * num_out, transcendentals=0
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="pinned_linear",
    )(x, weight)
