"""Products of rows with their experts on TPUs (Mosaic, v4 and newer): each chosen expert streams through VMEM once.

1. The grid is (out blocks, in blocks, tiles). All rows' inputs of an in block stay in VMEM while the tiles pass by, and so do
   all rows' sums of an out block, over all in blocks. A table in scalar memory names each tile's expert, whose block of weights
   is fetched while the tile before is multiplied. Tiles of one expert follow each other, and fetch it once; steps past the last
   tile fetch and compute nothing.
2. A tile takes its rows' inputs and sums, adds products as `linear.pallas_tpu` does, of TILE_ROWS rows and as many inputs, one
   block after the other, and puts the sums back. So rows lie in memory in their own order, before and after. A row meets one
   shape of product and one order of sums, whatever tile it is in.
3. Rows are taken one by one, as 32-bit numbers: two bfloat16 inputs, from the halves of an in block, make one.
4. Edges: outputs past the last are computed from undefined memory and never stored, as are the rows that a tile lacks. The last
   in block is cut to the inputs that exist.

Estimate of the bytes besides weights, for a layer of Qwen3-30B-A3B (128 experts of 768, 8 a row, 2048 wide) and 256 rows. Each
block of outputs reads the inputs once: 2 x 1 MB for gate and up, 3 x 3 MB for down. Results are written once: 29 MB. Together
that is 40 MB, or 3 % of the 1,208 MB of weights. TILE_ROWS rows cost 128 FLOP per byte of weights, as in pinned products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from detspec.errors import InputError
from detspec.ops.experts.arrange import Arrangement, arrange
from detspec.ops.linear.pallas_tpu import BLOCKS, TILE_ROWS

MAX_PAIRS = 2048  # pairs of a row and an expert whose sums stay in VMEM; more are multiplied part by part
IN_BLOCKS = 2  # blocks of inputs of pinned products in an in block
GROUP = 16  # rows of a tile that are taken together: as many bfloat16 rows lie together in VMEM
LANES = 128
MAX_OUT = 1024  # outputs of a block
VMEM_BYTES = 15 << 20  # a kernel has 16 MiB by default


class Blocks(NamedTuple):
    """Sizes of blocks: `inputs` fill `words` of 32 bits, and are added `added` at a time."""

    added: int
    inputs: int
    words: int
    outputs: int
    num_in: int
    num_out: int


@partial(jax.jit, static_argnames=("interpret",))  # experts of one shape are lowered once
def experts_f32(
    x: jax.Array, ids: jax.Array, weights: Sequence[jax.Array], used: jax.Array | None = None, *, interpret: bool = False
) -> list[jax.Array]:
    """See `api.experts_fn`; `x [R, in]` or `[R, k, in]` -> float32 `[R, k, out]` of each weight `[E, out, in]`, any sizes."""
    if x.dtype not in BLOCKS:
        raise InputError(f'x and experts of "pallas_tpu" must be bfloat16 or float32, got {x.dtype}')
    R, k = ids.shape
    if ids.size == 0:
        return [jnp.zeros((R, k, weight.shape[1]), jnp.float32) for weight in weights]
    if used is not None:
        ids = jnp.where(used[:, None], ids, -1)
    products = partial(_products, weights=weights, interpret=interpret)
    rows = max(MAX_PAIRS // k, 1)  # of a part
    parts = -(-R // rows)
    if parts == 1:
        return products(x, ids)
    added = parts * rows - R
    x = jnp.pad(x, ((0, added), *[(0, 0)] * (x.ndim - 1))).reshape(parts, rows, *x.shape[1:])
    ids = jnp.pad(ids, ((0, added), (0, 0)), constant_values=-1).reshape(parts, rows, k)
    found = jax.lax.map(lambda part: products(*part), (x, ids))
    return [y_f32.reshape(parts * rows, k, -1)[:R] for y_f32 in found]


def _products(x: jax.Array, ids: jax.Array, *, weights: Sequence[jax.Array], interpret: bool) -> list[jax.Array]:
    """`experts_f32` of at most MAX_PAIRS pairs."""
    R, k = ids.shape
    arranged = arrange(ids, weights[0].shape[0], tile=TILE_ROWS, unit=1)
    rows = arranged.pairs if x.ndim == 3 else arranged.pairs // k  # whose inputs a place takes
    block_in = min(IN_BLOCKS * BLOCKS[x.dtype][1], x.shape[-1])
    words = _words(x.reshape(-1, x.shape[-1]), block_in)
    return [_product(words, rows, arranged, weight, interpret).reshape(R, k, -1) for weight in weights]


def _product(words: jax.Array, rows: jax.Array, arranged: Arrangement, weight: jax.Array, interpret: bool) -> jax.Array:
    """The products of all pairs with their experts' matrices, in the order of pairs, `[N, out]`; zeros without an expert."""
    N = arranged.places.shape[0]
    num_rows = words.shape[0]
    blocks = _blocks(num_rows, N, weight)
    in_blocks = -(-blocks.num_in // blocks.inputs)
    taken = blocks.words * 4 // weight.dtype.itemsize  # inputs that words hold

    def weight_block(out: Any, step: Any, tile: Any, *tables: Any) -> tuple[Any, Any, Any]:
        """The block of the tile's expert, or of the last tile's."""
        *_, experts_ref, _, _, num_tiles_ref = tables
        return experts_ref[jnp.clip(tile, 0, jnp.maximum(num_tiles_ref[0] - 1, 0))], out, step

    words_spec = pl.BlockSpec((num_rows, blocks.words), lambda out, step, tile, *_: (0, step), pipeline_mode=pl.Buffered(1))
    return pl.pallas_call(
        partial(_multiply_tile, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(-(-blocks.num_out // blocks.outputs), in_blocks, arranged.experts.shape[0]),
            in_specs=[words_spec, pl.BlockSpec((1, blocks.outputs, blocks.inputs), weight_block)],
            out_specs=pl.BlockSpec((N, blocks.outputs), lambda out, step, tile, *_: (0, out), pipeline_mode=pl.Buffered(1)),
            scratch_shapes=[
                pltpu.VMEM((GROUP, blocks.words), words.dtype),
                pltpu.VMEM((TILE_ROWS, taken), weight.dtype),
                pltpu.VMEM((TILE_ROWS, blocks.outputs), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((N, blocks.num_out), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * blocks.num_in * blocks.num_out,
            bytes_accessed=words.nbytes + weight.nbytes + 4 * N * blocks.num_out,
            transcendentals=0,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="experts",
    )(rows, *arranged[1:], words, weight)


def _blocks(num_rows: int, num_pairs: int, weight: jax.Array) -> Blocks:
    """As many outputs as fit into VMEM: sums of all pairs and of a tile, two blocks of weights, inputs of rows and a tile."""
    _, num_out, num_in = weight.shape
    added = BLOCKS[weight.dtype][1]
    inputs = min(IN_BLOCKS * added, num_in)
    words = -(-inputs // (2 * LANES)) * 2 * LANES * weight.dtype.itemsize // 4
    left = VMEM_BYTES - 4 * words * (num_rows + TILE_ROWS + GROUP)
    most = left // (4 * (num_pairs + TILE_ROWS) + 2 * inputs * weight.dtype.itemsize) // LANES * LANES
    out_blocks = -(-num_out // min(max(most, LANES), MAX_OUT))
    return Blocks(added, inputs, words, -(-num_out // (out_blocks * LANES)) * LANES, num_in, num_out)


def _multiply_tile(*refs: Any, blocks: Blocks) -> None:
    """Adds the products of a tile's rows with a block of its expert's weights.

    `refs`: for each place a row and a pair, for each tile an expert, a first place and a number of rows, the number of tiles,
    then words `[rows, words]`, a block of weights `[1, outputs, inputs]`, sums `[N, outputs]`, and scratch.
    """
    rows_ref, pairs_ref, _, firsts_ref, sizes_ref, _, words_ref, weight_ref, y_ref, taken_ref, x_ref, sums_ref = refs
    step = pl.program_id(1)
    last_step = (blocks.num_in - 1) // blocks.inputs
    tile = pl.program_id(2)
    first = firsts_ref[tile]
    size = sizes_ref[tile]

    def take(group: jax.Array, _: None) -> None:
        for i in range(GROUP):  # the last row stands for those past it
            place = first + jnp.minimum(group * GROUP + i, size - 1)
            taken_ref[pl.ds(i, 1), :] = words_ref[pl.ds(rows_ref[place], 1), :]
            sums_ref[pl.ds(group * GROUP + i, 1), :] = y_ref[pl.ds(pairs_ref[place], 1), :]
        x_ref[pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP), :] = _inputs(taken_ref[...], x_ref.dtype)

    def put(group: jax.Array, _: None) -> None:
        for i in range(GROUP):
            row = jnp.minimum(group * GROUP + i, size - 1)
            y_ref[pl.ds(pairs_ref[first + row], 1), :] = sums_ref[pl.ds(row, 1), :]

    def add_products(num: int) -> None:
        for start in range(0, num, blocks.added):
            inputs = slice(start, min(start + blocks.added, num))
            sums_ref[...] += jax.lax.dot_general(
                x_ref[:, inputs],
                weight_ref[0, :, inputs],
                (((1,), (1,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )

    @pl.when((step == 0) & (tile == 0))
    def begin() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    @pl.when(size > 0)
    def multiply() -> None:
        groups = jax.lax.div(size + GROUP - 1, GROUP)
        jax.lax.fori_loop(0, groups, take, None)
        pl.when(step < last_step)(lambda: add_products(blocks.inputs))
        pl.when(step == last_step)(lambda: add_products(blocks.num_in - last_step * blocks.inputs))
        jax.lax.fori_loop(0, groups, put, None)


def _words(x: jax.Array, block_in: int) -> jax.Array:
    """Rows as 32-bit numbers `[rows, words]`: float32 as it is, and two bfloat16 in one, from both halves of an in block."""
    num_in = x.shape[1]
    width = -(-block_in // (2 * LANES)) * 2 * LANES
    blocks = -(-num_in // block_in)
    x = jnp.pad(x, ((0, 0), (0, blocks * block_in - num_in))).reshape(-1, blocks, block_in)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, width - block_in)))
    if x.dtype == jnp.float32:
        return x.reshape(-1, blocks * width)
    low, high = (jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in jnp.split(x, 2, axis=2))
    return (low | (high << 16)).reshape(-1, blocks * width // 2)


def _inputs(words: jax.Array, dtype: Any) -> jax.Array:
    """The rows that `_words` made, of one in block: bfloat16 are the upper halves of float32."""
    if dtype == jnp.float32:
        return words
    halves = (words << 16, words & jnp.uint32(0xFFFF0000))
    return jnp.concatenate([jax.lax.bitcast_convert_type(half, jnp.float32).astype(dtype) for half in halves], axis=1)
