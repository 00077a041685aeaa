"""Products of rows with their experts on GPUs (Mosaic GPU, Hopper): the pinned products, whose blocks name their expert.

1. Rows are gathered in the order of their experts, each expert's from a multiple of COPY_ROWS on, and cut into tiles of
   TILE_ROWS. A thread block multiplies a tile by 128 outputs of its expert's matrix, as `linear.pallas_gpu` does: one shape of
   instruction, the same parts of the inputs in the same order. So a row's bits are those of its pinned product.
2. A table names each tile's expert, first row and number of rows. A thread block takes the tiles that exist, whose number the
   table holds. A tile meets STRIP blocks of outputs at about the same time, which read its rows from the L2 cache. The next
   tile meets the same blocks soon after: where it has the same expert, its weights come from the cache, too.
3. Of a tile only rows in use are read, rounded up to 8, 16, 32 or 64, and written, rounded up to COPY_ROWS. What the rest of a
   tile holds no other row sees. The last block of a weight has only the outputs that exist, as chips that share an expert need;
   what the rest of it gives is cut off. Other inputs than multiples of 64 are padded, in each pass.

Estimate of the bytes besides weights, for a layer of Qwen3-30B-A3B (128 experts of 768, 8 a row, 2048 wide) and 256 rows. There
are at most 2,048 + 7 x 128 gathered rows:

    gathered rows, bfloat16, written and read      24 MB for gate and up,  9 MB for down
    results, float32                               18 MB                  24 MB
    results in the order of rows                   25 MB                  34 MB

Together they are 134 MB, or 11 % of the 1,208 MB of weights; with 32 rows 36 MB, or 3 %. A tile's 64 rows cost 64 FLOP per byte
of weights, as in pinned products.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.errors import InputError
from detspec.ops.experts.arrange import Arrangement, arrange
from detspec.ops.gpu_simulator import simulator
from detspec.ops.linear import pallas_gpu as linear
from detspec.ops.linear.pallas_gpu import BLOCK_IN, BLOCK_OUT, COPY_ROWS, PARTS, TILE_ROWS, Ring, up_to

STAGES = linear.STAGES[1]
COPIES = (8, 16, 32, 64)  # rows of a tile that are fetched
STRIP = 16  # blocks of outputs that a tile meets at about the same time


@partial(jax.jit, static_argnames=("interpret",))  # experts of one shape are lowered once
def experts_f32(
    x: jax.Array, ids: jax.Array, weights: Sequence[jax.Array], used: jax.Array | None = None, *, interpret: bool = False
) -> list[jax.Array]:
    """See `api.experts_fn`; `x [R, in]` or `[R, k, in]` -> float32 `[R, k, out]` of each weight `[E, out, in]`, any sizes."""
    if x.dtype not in linear.DTYPES:
        raise InputError(f'x and experts of "pallas_gpu" must be bfloat16 or float16, got {x.dtype}')
    R, k = ids.shape
    num_experts = weights[0].shape[0]
    num_in = x.shape[-1]
    if ids.size == 0:
        return [jnp.zeros((R, k, weight.shape[1]), jnp.float32) for weight in weights]
    if used is not None:
        ids = jnp.where(used[:, None], ids, num_experts)
    arranged = arrange(ids, num_experts, tile=TILE_ROWS, unit=COPY_ROWS)
    pairs = jnp.pad(arranged.pairs, (0, TILE_ROWS))  # a copy may end past its tile's rows
    x = x[pairs // k] if x.ndim == 2 else x.reshape(R * k, num_in)[pairs]
    added_in = max(up_to(num_in, BLOCK_IN), linear.LEAST) - num_in
    whole = [
        jnp.pad(weight, ((0, 0), (0, -weight.shape[1] % COPY_ROWS), (0, added_in)))
        if added_in or weight.shape[1] % COPY_ROWS
        else weight
        for weight in weights
    ]
    y = _products(jnp.pad(x, ((0, 0), (0, added_in))), arranged, whole, interpret)
    found = y.at[arranged.places].get(mode="fill", fill_value=0).reshape(R, k, -1)
    starts = accumulate((up_to(weight.shape[1], BLOCK_OUT) for weight in weights), initial=0)
    return [found[..., start : start + weight.shape[1]] for start, weight in zip(starts, weights, strict=False)]


def _products(x: jax.Array, arranged: Arrangement, weights: Sequence[jax.Array], interpret: bool) -> jax.Array:
    """Products of arranged rows `x [rows, in]`, whole blocks of outputs of each weight, float32; undefined where no tile is."""
    blocks = sum(-(-weight.shape[1] // BLOCK_OUT) for weight in weights)
    num_steps = x.shape[1] // BLOCK_IN
    steps = -(-num_steps // PARTS)  # steps of a part; the last one may have fewer
    parts = -(-num_steps // steps)
    items = arranged.experts.size * blocks  # at most
    is_cut = parts > 1 and items < linear.PROCESSORS
    y = plgpu.kernel(
        partial(_multiply, steps=steps, is_cut=is_cut, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((parts if is_cut else 1, x.shape[0], blocks * BLOCK_OUT), jnp.float32),
        scratch_types=[
            plgpu.SMEM((STAGES, TILE_ROWS, BLOCK_IN), x.dtype, transforms=linear.swizzle(BLOCK_IN, 2)),
            plgpu.SMEM((STAGES, BLOCK_OUT, BLOCK_IN), x.dtype, transforms=linear.swizzle(BLOCK_IN, 2)),
            plgpu.SMEM((TILE_ROWS, BLOCK_OUT), jnp.float32, transforms=linear.swizzle(linear.COLUMNS, 4)),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        ],
        grid=(min((parts if is_cut else 1) * items, linear.processors()),),
        grid_names=("thread_block",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="experts",
        interpret=simulator() if interpret else None,
    )(x, *arranged[2:], *weights)
    total_f32 = y[0]
    for part_f32 in y[1:]:
        total_f32 = total_f32 + part_f32
    return total_f32


def _multiply(x_gmem: Any, *refs: Any, steps: int, is_cut: bool, interpret: bool) -> None:
    """Runs one warpgroup of a thread block: the second one fetches what the first multiplies.

    `refs`: each tile's expert, first row and number of rows, the number of tiles, weights [E, out, in], y [parts, rows, out]
    float32, and scratch.
    """
    experts, firsts, sizes, num_tiles_ref, *weights, y_gmem, x_ring, weight_ring, y_smem, arrived, free = refs
    ring = Ring(x_ring, weight_ring, arrived, free)
    blocks = y_gmem.shape[2] // BLOCK_OUT
    num_steps = x_gmem.shape[1] // BLOCK_IN
    num_tiles = num_tiles_ref[0]
    num_items = y_gmem.shape[0] * blocks * num_tiles
    thread_block, warpgroup = (jax.lax.axis_index(name) for name in ("thread_block", "warpgroup"))
    thread_blocks = jax.lax.axis_size("thread_block")
    num_own = jax.lax.div(num_items - thread_block + thread_blocks - 1, thread_blocks)

    def item_of(index: jax.Array) -> linear.Item:
        """Item number `index` of this thread block: a strip of blocks of outputs, all its tiles, the blocks of each tile."""
        part, rest = linear.divided(thread_block + index * thread_blocks, blocks * num_tiles)
        strip, rest = linear.divided(rest, STRIP * num_tiles)
        tile, out_block = linear.divided(rest, jnp.minimum(blocks - strip * STRIP, STRIP))
        out_block = strip * STRIP + out_block
        last = jnp.minimum((part + 1) * steps, num_steps) if is_cut else jnp.int32(num_steps)
        return linear.Item(part, out_block, tile, part * steps, last)

    def rows_of(item: linear.Item) -> tuple[jax.Array, jax.Array]:
        """The first row of an item's tile, which the compiler has to know for a multiple of COPY_ROWS, and how many it has."""
        return pl.multiple_of(firsts[item.row_block], COPY_ROWS), sizes[item.row_block]

    def fetch_item(index: jax.Array, position: jax.Array) -> jax.Array:
        """Fetches an item, whose first blocks take the place `position` in the ring; returns the place after its last ones."""
        item = item_of(index)
        expert = experts[item.row_block]
        first_row, rows = rows_of(item)

        def fetch_all(weight: Any, first_out: jax.Array | int, outputs: int) -> None:
            def fetch(step: jax.Array, _: None) -> None:
                place = position + step - item.first
                slot = jax.lax.rem(place, STAGES)

                @pl.when(place >= STAGES)
                def wait_for_slot() -> None:
                    plgpu.barrier_wait(free.at[slot])

                inputs = pl.ds(step * BLOCK_IN, BLOCK_IN)
                block = weight.at[expert, pl.ds(first_out, outputs), inputs]
                plgpu.copy_gmem_to_smem(block, weight_ring.at[slot, pl.ds(0, outputs)], arrived.at[slot])
                for copied in COPIES:  # one of them

                    @pl.when((rows <= copied) & (2 * rows > copied) if copied > COPIES[0] else rows <= copied)
                    def fetch_rows(copied: int = copied) -> None:
                        ours = x_gmem.at[pl.ds(first_row, copied), inputs]
                        plgpu.copy_gmem_to_smem(ours, x_ring.at[slot, pl.ds(0, copied)], arrived.at[slot])

            jax.lax.fori_loop(item.first, item.last, fetch, None)

        _of_each_block(weights, item.out_block, fetch_all)
        return position + item.last - item.first

    def multiply_item(index: jax.Array, position: jax.Array) -> jax.Array:
        """Multiplies an item and begins to store it; returns the place in the ring after its last blocks."""
        item = item_of(index)
        part_of = partial(linear.sums_of_part, ring, pl.ds(0, TILE_ROWS), dtype=jnp.float32, interpret=interpret)
        first_f32 = part_of(position, jnp.minimum(item.last - item.first, steps))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left
        y_smem[...] = first_f32
        if not is_cut:

            def add_part(part: jax.Array, _: None) -> None:
                next_f32 = part_of(position + part * steps, jnp.minimum(steps, num_steps - part * steps))
                y_smem[...] = y_smem[...] + next_f32  # read now: before the products it would take registers

            jax.lax.fori_loop(1, -(-num_steps // steps), add_part, None)
        plgpu.commit_smem()
        first_row, rows = rows_of(item)

        columns = pl.ds(item.out_block * BLOCK_OUT, BLOCK_OUT)
        for row in range(0, TILE_ROWS, COPY_ROWS):

            @pl.when(row < rows)
            def store_rows(row: int = row) -> None:
                place = y_gmem.at[item.part, pl.ds(first_row + row, COPY_ROWS), columns]
                plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(row, COPY_ROWS)], place)

        return position + item.last - item.first

    @pl.when(warpgroup == 1)
    def fetcher() -> None:
        end = jax.lax.fori_loop(0, num_own, fetch_item, jnp.int32(0))

        def wait_for_release(place: jax.Array, _: None) -> None:
            plgpu.barrier_wait(free.at[jax.lax.rem(place, STAGES)])

        jax.lax.fori_loop(jnp.maximum(end - STAGES, 0), end, wait_for_release, None)  # barriers end as they began

    @pl.when(warpgroup == 0)
    def multiplier() -> None:
        jax.lax.fori_loop(0, num_own, multiply_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _of_each_block(weights: Sequence[Any], out_block: jax.Array, run: Callable[[Any, jax.Array | int, int], None]) -> None:
    """Calls `run(weight, first output, number of outputs)` for the weight that a block belongs to; its last one may be cut."""
    first_block = 0
    for weight in weights:
        whole, rest = divmod(weight.shape[1], BLOCK_OUT)
        block = out_block - first_block
        if whole:
            pl.when((block >= 0) & (block < whole))(partial(run, weight, block * BLOCK_OUT, BLOCK_OUT))
        if rest:
            pl.when(block == whole)(partial(run, weight, whole * BLOCK_OUT, rest))
        first_block += whole + bool(rest)
