"""Pinned products on GPUs (Mosaic GPU, Hopper): one warpgroup streams blocks into shared memory, one or two multiply them.

They are of bfloat16 or float16 with sums in float32, or of int8 with sums in int32, which any order gives.

1. The inputs of a weight are cut into PARTS parts, by their number alone. A part's products are wgmma instructions of one shape
   into one float32 accumulator, over inputs ascending; the parts are added one after the other:

       inputs    0 .. 1023 | 1024 .. 2047 | 2048 .. 3071 | 3072 .. 4095
       y       = ((  p0    +      p1   )  +      p2   )  +      p3

2. A thread block computes 128 outputs of one or two tiles of TILE_ROWS rows, one compute warpgroup per tile. It makes all
   parts, or, where there would be fewer blocks than processors, one part, and the program around adds them. Both are the same
   sums. So a row's bits depend neither on the number of rows nor on that of outputs, which chips may share.
3. Blocks of BLOCK_IN inputs go through a ring of STAGES buffers, filled by TMA. Rows that a tile lacks are not read: its
   product has them from memory that nothing wrote, and no other row sees them.
4. Several weights that multiply the same rows are one kernel: its blocks of outputs belong to the first weight, then to the
   second.
5. Edges: rows are padded to COPY_ROWS, or to whole blocks of rows. The last block of outputs begins early, so that it ends at
   the last output; it recomputes some outputs, with the same bits. A weight with fewer than 128 inputs or outputs, whose inputs
   are no multiple of 64, or whose outputs are none of 16 is padded with zeros. That is a copy in each pass, which small models
   can afford. No large model has such sizes, not even an eighth of its head: 151936 / 8 = 18992 = 16 x 1187.

Why these sizes: 64 bf16 rows need 64 FLOP per byte of weights. An H200 does 200 in the time of reading a byte, so padding a few
decode rows to a tile costs no time. A byte of memory needs about 1.3 us to arrive, so 4.8 TB/s take 48 KiB in flight on each of
132 processors. The ring of one tile holds 128 KiB of weights. Measured on an H200 with 32 rows, the weights of an 8B layer
take 117 us (qkv 16.5, o 11.0, gate and up 59.5, down 30.2), XLA's products 133; a copy of as many bytes takes 105. Thread
blocks that stay are worth a tenth, and a fifth with many rows: the next block of the result is fetched while the last one is
stored.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.errors import InputError
from detspec.ops.gpu_simulator import simulator

PARTS = 4  # parts of the inputs
TILE_ROWS = 64  # rows of one product
MAX_TILES = 2  # tiles that share one block of weights
BLOCK_OUT = 128
BLOCK_IN = 64  # in floats; twice as many in int8: 128 bytes
STAGES = {1: 8, 2: 5}  # buffers of the ring, by the number of tiles
PROCESSORS = 132  # multiprocessors of an H100 or H200 in their usual form: with fewer blocks, each makes one part
COPY_ROWS = 8  # rows that lie together in swizzled shared memory
COLUMNS = 32  # columns of results that lie together in swizzled shared memory; half as many fit more sizes
LEAST = 128  # inputs and outputs of a weight: with fewer it is padded
DTYPES = (jnp.bfloat16, jnp.float16)
SUMS = {jnp.dtype(jnp.int8): jnp.int32}  # the dtype of sums; of all others float32


def linears_f32(x: jax.Array, weights: Sequence[jax.Array], *, interpret: bool = False) -> list[jax.Array]:
    """See `api.linears_fn`; `x [R, in]` -> float32 `[R, out]` of each weight, any sizes, bfloat16 or float16."""
    if x.dtype not in DTYPES:
        raise InputError(f'x and weight of "pallas_gpu" products must be bfloat16 or float16, got {x.dtype}')
    return _products(x, weights, interpret=interpret)


def integer_sums(x: jax.Array, weights: Sequence[jax.Array], *, interpret: bool = False) -> list[jax.Array]:
    """Exact sums, int32 `[R, out]` for each weight, of the products of int8 `x [R, in]` and weights `[out, in]`."""
    return _products(x, weights, interpret=interpret)


@partial(jax.jit, static_argnames=("interpret",))  # weights of one shape are lowered once
def _products(x: jax.Array, weights: Sequence[jax.Array], *, interpret: bool) -> list[jax.Array]:
    """Products of rows `x [R, in]` with weights `[out, in]`, all of one dtype: their sums `[R, out]`."""
    itemsize = x.dtype.itemsize
    block_in = 2 * BLOCK_IN // itemsize
    sums = SUMS.get(x.dtype, jnp.float32)
    R, num_in = x.shape
    if R == 0:
        return [jnp.zeros((0, weight.shape[0]), sums) for weight in weights]
    tiles = min(-(-R // TILE_ROWS), MAX_TILES)
    block_rows = tiles * TILE_ROWS
    row_blocks = -(-R // block_rows)
    padded_rows = up_to(R, COPY_ROWS) if tiles == 1 else row_blocks * block_rows
    padded_in = max(up_to(num_in, block_in), LEAST)
    x = jnp.pad(x, ((0, padded_rows - R), (0, padded_in - num_in)))
    whole = [padded(weight, padded_in) for weight in weights]
    sizes = [weight.shape[0] for weight in whole]
    columns = COLUMNS // 2 if any(size % COLUMNS for size in sizes) else COLUMNS
    blocks = sum(-(-size // BLOCK_OUT) for size in sizes)
    num_steps = padded_in // block_in
    steps = -(-num_steps // PARTS)  # steps of a part; the last one may have fewer
    parts = -(-num_steps // steps)
    is_cut = parts > 1 and blocks * row_blocks < PROCESSORS
    y = plgpu.kernel(
        partial(_multiply, steps=steps, is_cut=is_cut, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((parts if is_cut else 1, padded_rows, sum(sizes)), sums),
        scratch_types=[
            plgpu.SMEM((STAGES[tiles], block_rows, block_in), x.dtype, transforms=swizzle(block_in, itemsize)),
            plgpu.SMEM((STAGES[tiles], BLOCK_OUT, block_in), x.dtype, transforms=swizzle(block_in, itemsize)),
            plgpu.SMEM((block_rows, BLOCK_OUT), sums, transforms=swizzle(columns, 4)),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES[tiles]),
            plgpu.Barrier(num_arrivals=tiles, num_barriers=STAGES[tiles]),
        ],
        grid=(min((parts if is_cut else 1) * blocks * row_blocks, processors()),),
        grid_names=("thread_block",),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        kernel_name="pinned_linear",
        interpret=simulator() if interpret else None,
    )(x, *whole)
    total = y[0]
    for part in y[1:]:
        total = total + part
    starts = accumulate(sizes, initial=0)
    return [total[:R, start : start + weight.shape[0]] for start, weight in zip(starts, weights, strict=False)]


class Ring(NamedTuple):
    """Buffers of shared memory that the fetching warpgroup fills in turn, with a barrier for each that is full or free."""

    x: Any  # [stages, rows, block_in]
    weights: Any  # [stages, BLOCK_OUT, block_in]
    arrived: Any
    free: Any


class Item(NamedTuple):
    """A block of the result, or one part of it: all int32."""

    part: jax.Array
    out_block: jax.Array
    row_block: jax.Array
    first: jax.Array  # first block of inputs
    last: jax.Array  # block after the last block of inputs


def _multiply(x_gmem: Any, *refs: Any, steps: int, is_cut: bool, interpret: bool) -> None:
    """Runs one warpgroup of a thread block: the last one fetches what the others multiply.

    `refs`: weights [out, in], y [parts, rows, out], and scratch.
    """
    *weights, y_gmem, x_ring, weight_ring, y_smem, arrived, free = refs
    stages, block_rows, block_in = x_ring.shape
    tiles = block_rows // TILE_ROWS
    used = min(x_gmem.shape[0], block_rows)
    row_blocks = x_gmem.shape[0] // used
    blocks = sum(-(-weight.shape[0] // BLOCK_OUT) for weight in weights)
    num_steps = x_gmem.shape[1] // block_in
    num_items = y_gmem.shape[0] * blocks * row_blocks
    thread_block, warpgroup = (jax.lax.axis_index(name) for name in ("thread_block", "warpgroup"))
    thread_blocks = jax.lax.axis_size("thread_block")
    num_own = jax.lax.div(num_items - thread_block + thread_blocks - 1, thread_blocks)

    def item_of(index: jax.Array) -> Item:
        """Item number `index` of this thread block; blocks of rows that share a weight come at the same time."""
        rest, row_block = divided(thread_block + index * thread_blocks, row_blocks)
        part, out_block = divided(rest, blocks)
        return Item(
            part, out_block, row_block, part * steps, jnp.minimum((part + 1) * steps, num_steps) if is_cut else num_steps
        )

    def fetch_item(index: jax.Array, position: jax.Array) -> jax.Array:
        """Fetches an item, whose first blocks take the place `position` in the ring; returns the place after its last ones."""
        item = item_of(index)

        def fetch_all(weight: Any, first_out: jax.Array, _: jax.Array) -> None:
            def fetch(step: jax.Array, _: None) -> None:
                place = position + step - item.first
                slot = jax.lax.rem(place, stages)

                @pl.when(place >= stages)
                def wait_for_slot() -> None:
                    plgpu.barrier_wait(free.at[slot])

                inputs = pl.ds(step * block_in, block_in)
                rows = pl.ds(item.row_block * block_rows, used)
                plgpu.copy_gmem_to_smem(x_gmem.at[rows, inputs], x_ring.at[slot, pl.ds(0, used)], arrived.at[slot])
                plgpu.copy_gmem_to_smem(weight.at[pl.ds(first_out, BLOCK_OUT), inputs], weight_ring.at[slot], arrived.at[slot])

            jax.lax.fori_loop(item.first, item.last, fetch, None)

        of_each_weight(weights, item.out_block, fetch_all)
        return position + item.last - item.first

    def multiply_item(index: jax.Array, position: jax.Array) -> jax.Array:
        """Multiplies an item and begins to store it; returns the place in the ring after its last blocks."""
        item = item_of(index)
        first = part_of(position, jnp.minimum(item.last - item.first, steps))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left
        y_smem[tile_rows] = first
        if not is_cut:

            def add_part(part: jax.Array, _: None) -> None:
                following = part_of(position + part * steps, jnp.minimum(steps, num_steps - part * steps))
                y_smem[tile_rows] = y_smem[tile_rows] + following  # read now: before the products it would take registers

            jax.lax.fori_loop(1, -(-num_steps // steps), add_part, None)
        plgpu.commit_smem()
        rows = min(used, TILE_ROWS)

        def store(_: Any, __: jax.Array, column: jax.Array) -> None:
            first_row = item.row_block * block_rows + warpgroup * TILE_ROWS
            place = y_gmem.at[item.part, pl.ds(first_row, rows), pl.ds(column, BLOCK_OUT)]
            plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(warpgroup * TILE_ROWS, rows)], place)

        of_each_weight(weights, item.out_block, store)
        return position + item.last - item.first

    tile_rows = pl.ds(warpgroup * TILE_ROWS, TILE_ROWS)
    ring = Ring(x_ring, weight_ring, arrived, free)
    part_of = partial(sums_of_part, ring, tile_rows, dtype=y_smem.dtype, interpret=interpret)

    @pl.when(warpgroup == tiles)
    def fetcher() -> None:
        end = jax.lax.fori_loop(0, num_own, fetch_item, jnp.int32(0))

        def wait_for_release(place: jax.Array, _: None) -> None:
            plgpu.barrier_wait(free.at[jax.lax.rem(place, stages)])

        jax.lax.fori_loop(jnp.maximum(end - stages, 0), end, wait_for_release, None)  # barriers end as they began

    @pl.when(warpgroup < tiles)
    def multiplier() -> None:
        jax.lax.fori_loop(0, num_own, multiply_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def sums_of_part(ring: Ring, rows: Any, position: jax.Array, num: jax.Array, *, dtype: Any, interpret: bool) -> jax.Array:
    """The products of `num` blocks of inputs, one after the other, from a place in the ring on: [TILE_ROWS, BLOCK_OUT].

    `rows` is the tile's place in a slot of the ring.
    """
    stages = ring.x.shape[0]

    def add_all(acc: Any) -> jax.Array:
        def add(place: jax.Array, total: Any) -> Any:
            slot = jax.lax.rem(place, stages)
            plgpu.barrier_wait(ring.arrived.at[slot])
            if interpret:
                total += product(ring.x.at[slot, rows], ring.weights.at[slot], dtype)
            else:
                plgpu.wgmma(acc, ring.x.at[slot, rows], ring.weights.at[slot].T)
                plgpu.wgmma_wait(1)

            @pl.when(place > position)
            def release() -> None:  # what the last product read; it is done
                plgpu.barrier_arrive(ring.free.at[jax.lax.rem(place - 1, stages)])

            return total

        zeros = jnp.zeros((TILE_ROWS, BLOCK_OUT), dtype) if interpret else None
        total = jax.lax.fori_loop(position, position + num, add, zeros)
        total = total if interpret else acc[...]
        plgpu.barrier_arrive(ring.free.at[jax.lax.rem(position + num - 1, stages)])
        return total

    return pl.run_scoped(add_all, plgpu.WGMMAAccumulatorRef((TILE_ROWS, BLOCK_OUT), dtype))


def of_each_weight(weights: Sequence[Any], out_block: jax.Array, run: Callable[[Any, jax.Array, jax.Array], None]) -> None:
    """Calls `run(weight, first output, its place in y)` for the weight `[..., out, in]` that a block of outputs belongs to."""
    first_block = first_column = 0
    for weight in weights:
        size = weight.shape[-2]
        end_block = first_block + -(-size // BLOCK_OUT)
        first_out = jnp.minimum((out_block - first_block) * BLOCK_OUT, size - BLOCK_OUT)
        is_own = (out_block >= first_block) & (out_block < end_block)
        pl.when(is_own)(partial(run, weight, first_out, first_column + first_out))
        first_block = end_block
        first_column += size


def product(x: Any, weight: Any, dtype: Any) -> jax.Array:
    """`x [rows, in]` times `weight [out, in]` as XLA does it, summed in `dtype`, for the simulator.

    Its own products are NumPy's, which round a row by its place, and in jax 0.10 take no transposed operand.
    """
    return jax.lax.dot_general(x[...], weight[...], (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def padded(weight: jax.Array, padded_in: int) -> jax.Array:
    """The weight `[..., out, in]` with `padded_in` inputs and a number of outputs that the kernel takes."""
    *leading, num_out, num_in = weight.shape
    size = max(up_to(num_out, COLUMNS // 2), LEAST)
    is_whole = (size, padded_in) == (num_out, num_in)
    return weight if is_whole else jnp.pad(weight, (*[(0, 0)] * len(leading), (0, size - num_out), (0, padded_in - num_in)))


def processors() -> int:
    """Processors of this process's GPU, each of which holds one thread block; an H100's if it has no GPU."""
    return int(getattr(jax.devices()[0], "core_count", PROCESSORS))


def swizzle(columns: int, itemsize: int) -> tuple[Any, ...]:
    """The layout of tiles of `columns` elements, swizzled over all their bytes."""
    return plgpu.TilingTransform((COPY_ROWS, columns)), plgpu.SwizzleTransform(columns * itemsize)


def divided(number: jax.Array, divisor: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder, of what is not negative."""
    return jax.lax.div(number, divisor), jax.lax.rem(number, divisor)


def up_to(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
