"""Pinned products on GPUs (Mosaic GPU, Hopper): one warpgroup streams blocks into shared memory, one or two multiply them.

1. A thread block computes 128 outputs of one or two tiles of TILE_ROWS rows, one compute warpgroup per tile. A tile's products
   are wgmma instructions of one shape into one float32 accumulator, over inputs ascending. A second tile does not change
   them. Nothing is split.
2. Blocks of BLOCK_IN inputs go through a ring of STAGES buffers, filled by TMA: 224 KiB of shared memory with two tiles.
3. Edges: rows are padded to whole tiles with zeros. The last block of outputs begins early, so that it ends at the last
   output; it recomputes some outputs, with the same bits. A weight with a size below 128, or not a multiple of 64, is padded
   with zeros. That is a copy, which small models can afford; no large model has such sizes.

Why these sizes: 64 bf16 rows need 64 FLOP per byte of weights. An H200 does 165 in the time of reading a byte, so padding a
few decode rows to a tile costs no time. Blocks of 128 outputs, not 256, spread 4096 outputs over 32 thread blocks, which use
most of the bandwidth. With 256 rows two blocks need the same weights at the same time: one reads HBM, the other hits L2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.errors import InputError
from detspec.ops.gpu_simulator import simulator

TILE_ROWS = 64  # rows of one product
MAX_TILES = 2  # tiles that share one block of weights
BLOCK_OUT = 128
BLOCK_IN = 64
STAGES = 5
IN_FLIGHT = 1  # blocks still being multiplied while the kernel waits for the next one
GRANULE = 64  # sizes of a weight are padded to multiples of this
LEAST = 128  # and at least to this
DTYPES = (jnp.bfloat16, jnp.float16)
SWIZZLE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # 64 two-byte elements fill the widest swizzle


@partial(jax.jit, static_argnames=("interpret",))  # weights of one shape are lowered once
def linear_f32(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.linear_fn`; `x [R, in]`, any sizes, bfloat16 or float16."""
    if x.dtype not in DTYPES:
        raise InputError(f'x and weight of "pallas_gpu" products must be bfloat16 or float16, got {x.dtype}')
    R, num_in = x.shape
    num_out = weight.shape[0]
    tiles = min(-(-R // TILE_ROWS), MAX_TILES)
    block_rows = tiles * TILE_ROWS
    row_blocks = -(-R // block_rows)
    padded_in, padded_out = (max(-(-size // GRANULE) * GRANULE, LEAST) for size in (num_in, num_out))
    x = jnp.pad(x, ((0, row_blocks * block_rows - R), (0, padded_in - num_in)))
    if (padded_out, padded_in) != weight.shape:
        weight = jnp.pad(weight, ((0, padded_out - num_out), (0, padded_in - num_in)))

    # Pallas's interpreter cannot multiply by a transposed operand: it gets the weight and its blocks transposed.
    def turn(pair: tuple[Any, Any]) -> tuple[Any, Any]:
        return (pair[1], pair[0]) if interpret else pair

    def kernel(x_gmem, weight_gmem, y_gmem, y_smem):  # type: ignore[no-untyped-def]
        tile = jax.lax.axis_index("warpgroup")
        first_row = jax.lax.axis_index("row_block") * block_rows
        first_out = jnp.minimum(jax.lax.axis_index("out_block") * BLOCK_OUT, padded_out - BLOCK_OUT)
        tile_rows = pl.ds(tile * TILE_ROWS, TILE_ROWS)

        def multiply(_, x_smem, weight_smem, acc):  # type: ignore[no-untyped-def]
            plgpu.wgmma(acc, x_smem.at[tile_rows], weight_smem if interpret else weight_smem.T)
            plgpu.wgmma_wait(IN_FLIGHT)
            return acc

        def accumulate(run_pipeline) -> None:  # type: ignore[no-untyped-def]
            def scope(acc) -> None:  # type: ignore[no-untyped-def]
                run_pipeline(acc)
                y_smem[tile_rows] = acc[...]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    y_smem.at[tile_rows], y_gmem.at[pl.ds(first_row + tile * TILE_ROWS, TILE_ROWS), pl.ds(first_out, BLOCK_OUT)]
                )
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(scope, plgpu.ACC((TILE_ROWS, BLOCK_OUT), jnp.float32))  # type: ignore[attr-defined]  # missing in a stub

        plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(padded_in // BLOCK_IN,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((block_rows, BLOCK_IN), lambda step: (0, step), transforms=SWIZZLE, delay_release=IN_FLIGHT),
                plgpu.BlockSpec(
                    turn((BLOCK_OUT, BLOCK_IN)), lambda step: turn((0, step)), transforms=SWIZZLE, delay_release=IN_FLIGHT
                ),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=tiles,
            max_concurrent_steps=STAGES,
            compute_context=accumulate,
        )(x_gmem.at[pl.ds(first_row, block_rows)], weight_gmem.at[turn((pl.ds(first_out, BLOCK_OUT), slice(None)))])

    y = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((row_blocks * block_rows, padded_out), jnp.float32),
        scratch_types=[plgpu.SMEM((block_rows, BLOCK_OUT), jnp.float32)],
        grid=(-(-padded_out // BLOCK_OUT), row_blocks),
        grid_names=("out_block", "row_block"),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        kernel_name="pinned_linear",
        interpret=simulator() if interpret else None,
    )(x, weight.T if interpret else weight)
    return y[:R, :num_out]
