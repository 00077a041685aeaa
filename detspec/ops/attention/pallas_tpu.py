"""Attention over a paged cache for TPU v4 and newer, in Pallas (Mosaic).

1. Queries are cut into tiles of `query_tile` positions of one window. A program of the grid handles one tile, or one split of
   it: all heads, over the pages the tile needs, ascending. Pages past the tile or before its sliding window are not read.
   The grid is as long as the list of tiles that need pages: padding, and splits of short sequences, have no program.
2. For every `W`, a tile's products have `query_tile * Q` rows per KV head. Rows that a short window lacks are zeros in VMEM,
   neither read nor written, and skip the softmax. So each row meets one shape of product, and the result does not depend on
   how rows were split into windows.
3. DMA copies whole pages: `[K, page, H]` is contiguous. A ring of `num_buffers` pages is filled ahead of the products, across
   the borders of tiles, so that short sequences do not wait for their first page.

       tiles       0          1     3            of one lane; tile 2 pads the pass and needs no page
       pages       a  b  c    d     e  f
       ring slot   0  1  0    1     0  1         num_buffers 2: while c is multiplied, d of the next tile is in flight

4. Pages in int8 come with the scales of their slots, `[K, page]` float32, in rings of their own. Their numbers are exact in the
   queries' dtype; scores are multiplied by the keys' scales, probabilities by the values' once `l` has them.

The grid has two lanes, which take turns in the list of tiles and are `parallel` to each other: chips with two cores under one
device (v4, v5p) run one lane each.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from detspec.cache import Int8Pages, Pages, numbers, slot_bytes
from detspec.errors import InputError
from detspec.ops.alibi import lower_scores, own_slopes
from detspec.ops.attention.reference import MASK_VALUE
from detspec.ops.attention.scores import Scores
from detspec.ops.attention.tiles import by_position, put_together, tile_positions
from detspec.ops.softcap import softcap
from detspec.schedule import Numerics

NUM_LANES = 2  # lanes of the grid, one for each TensorCore that a device may have
MIN_ROWS = 16  # a bfloat16 tile in VMEM has 16 rows
SUBLANES = 8  # rows of a float32 tile
LANE_WIDTH = 128  # columns of a register
IN_FLIGHT_BYTES = 2 << 20  # bytes in flight that hide the latency of HBM: about 1 us at 2 TB/s
MAX_BUFFERS = 8
VMEM_BYTES = 14 << 20  # a kernel has 16 MiB by default on the smallest chip
SMEM_BYTES = (1 << 20) - (8 << 10)  # scalar memory, less what the compiler needs
DTYPES = (jnp.bfloat16, jnp.float32)  # dtypes of floats in the cache, and of queries that meet integers


# Parts of `_plan_work`: arrays of `num_tiles` scalars, the last one longer.
FIRST_BLOCK, NUM_STEPS, FIRST_POSITION, LAST_POSITION, TILE, NUM_FACTS = range(6)


class TileShape(NamedTuple):
    """Sizes of a program."""

    rows: int  # M of the products, per KV head
    used_rows: int  # number of these rows that a window can fill
    num_buffers: int


class Tiling(NamedTuple):
    """How the grid's tiles relate to windows."""

    num_tiles: int
    tiles_per_window: int
    max_pages: int  # pages of one window's table
    Q: int  # query heads per KV head


@partial(jax.jit, static_argnames=("scores", "numerics"))  # layers of one shape are lowered once
def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scores: Scores,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array | None]:
    """See `api.attention_and_lse`; keys are `[num_pages, K, page, H]`, the cache is bfloat16, float32 or int8."""
    check(q, numbers(v_pages), page_tables, scores.alibi, numerics)
    scales = [pages.scale for pages in (k_pages, v_pages) if isinstance(pages, Int8Pages)]
    k_pages = numbers(k_pages)
    v_pages = numbers(v_pages)
    q_shape = G, W, N, H = q.shape
    K, page = v_pages.shape[1:3]
    Q = N // K
    splits = numerics.num_splits
    shape = tile_shape(q, v_pages, numerics)
    width = min(W, numerics.query_tile)  # positions of a tile that a window can fill
    tiles = -(-W // numerics.query_tile)

    # [G, W, N, H] -> [G * tiles, K, used_rows, H]
    q = jnp.pad(q, ((0, 0), (0, tiles * width - W), (0, 0), (0, 0))).astype(_product_dtype(q, v_pages))
    q = q.reshape(G * tiles, width, K, Q, H).transpose(0, 2, 1, 3, 4).reshape(G * tiles, K, width * Q, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, shape.used_rows - width * Q), (0, 0)))

    num_tiles = G * tiles * splits
    work, works = _plan_work(tile_positions(positions, tiles, width), page, scores.sliding_window, numerics)
    per_lane = jnp.maximum((works.sum(dtype=jnp.int32) + NUM_LANES - 1) // NUM_LANES, 1)
    tiling = Tiling(num_tiles, tiles * splits, page_tables.shape[1], Q)
    kernel = partial(_attend_tile, tiling=tiling, scores=scores, num_pools=2 + len(scales))

    def at_query(lane: jax.Array, index: jax.Array, work_ref: Any, _: Any) -> tuple[Any, ...]:
        tile = work_ref[TILE * num_tiles + index * NUM_LANES + lane]
        return jax.lax.div(jnp.minimum(tile, num_tiles - 1), splits), 0, 0, 0

    def at_result(lane: jax.Array, index: jax.Array, work_ref: Any, _: Any) -> tuple[Any, ...]:
        return work_ref[TILE * num_tiles + index * NUM_LANES + lane], 0, 0, 0

    rows, used, buffers = shape
    pools = [k_pages, v_pages, *scales]
    operands: list[Any] = [q, *pools]
    operand_specs = [pl.BlockSpec((None, K, used, H), at_query), *len(pools) * [pl.BlockSpec(memory_space=pl.ANY)]]
    if scores.alibi:
        operands.append(_row_slopes(N, K, used))
        operand_specs.append(pl.BlockSpec((K, used, LANE_WIDTH), lambda *_: (0, 0, 0)))
    result_shapes = [jax.ShapeDtypeStruct((num_tiles + NUM_LANES, K, used, H), jnp.float32)]
    result_specs = [pl.BlockSpec((None, K, used, H), at_result)]
    if splits > 1 or scores.lse:  # and the logarithm of each row's sum of exponentials, in every column
        result_shapes.append(jax.ShapeDtypeStruct((num_tiles + NUM_LANES, K, used, LANE_WIDTH), jnp.float32))
        result_specs.append(pl.BlockSpec((None, K, used, LANE_WIDTH), at_result))
    slots = G * tiles * page_tables.shape[1] * page  # as if every table were full
    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(NUM_LANES, per_lane),
            in_specs=operand_specs,
            out_specs=result_specs,
            scratch_shapes=[
                pltpu.VMEM((K, rows, H), q.dtype),
                *(pltpu.VMEM((buffers, numerics.block_pages, *pool.shape[1:]), pool.dtype) for pool in pools),
                pltpu.SemaphoreType.DMA((len(pools), buffers)),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.VMEM((K, used, LANE_WIDTH), jnp.float32),
                pltpu.VMEM((K, used, LANE_WIDTH), jnp.float32),
                pltpu.VMEM((K, used, H), jnp.float32),
            ],
        ),
        out_shape=result_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * K * H * slots,
            transcendentals=used * K * slots,
            bytes_accessed=2 * K * slots * slot_bytes(H, numerics) + q.nbytes + 4 * q.size,
        ),
        interpret=numerics.interpret,
        name="paged_attention",
    )(work, page_tables.reshape(-1), *operands)
    attended = results[0][:num_tiles, :, : width * Q].reshape(G * tiles, splits, K, width * Q, H)
    of_splits = [lse[:num_tiles, :, : width * Q, 0].reshape(G * tiles, splits, K, width * Q) for lse in results[1:]]
    attended, lse = put_together(works, attended, of_splits[0] if of_splits else None)
    found_lse = by_position(lse[..., None], q_shape, tiles)[..., 0] if lse is not None and scores.lse else None
    return by_position(attended, q_shape, tiles), found_lse


def check(q: jax.Array, v_pages: jax.Array, page_tables: jax.Array, alibi: bool, numerics: Numerics) -> None:
    """Raises `InputError`, naming the argument, for what the kernel does not support; shapes as in `api.paged_attention`."""
    K, page, H = v_pages.shape[1:]
    in_int8 = v_pages.dtype == jnp.int8
    if v_pages.dtype not in DTYPES and not in_int8:
        raise InputError(f'the "pallas_tpu" attention takes a bfloat16, float32 or int8 cache, got cache_dtype {v_pages.dtype}')
    if in_int8 and q.dtype not in DTYPES:
        raise InputError(f'the "pallas_tpu" attention over an int8 cache takes bfloat16 or float32 queries, got {q.dtype}')
    if in_int8 and page % LANE_WIDTH and not numerics.interpret:
        raise InputError(
            f'the "pallas_tpu" attention over an int8 cache takes pages of {LANE_WIDTH} slots or a multiple, got {page}'
        )
    if page % MIN_ROWS:
        raise InputError(f'the "pallas_tpu" attention takes pages of at least {MIN_ROWS} slots, got Numerics.page {page}')
    if (needed := vmem_bytes(q, v_pages, alibi, numerics)) > VMEM_BYTES:
        raise InputError(
            f'the "pallas_tpu" attention has {VMEM_BYTES:,} bytes of VMEM, and would need {needed:,} for {K} KV heads of '
            f"{H}, pages of {page}, block_pages {numerics.block_pages}, query_tile {numerics.query_tile}: lower one of these"
        )
    G, W = q.shape[:2]
    tiles = G * -(-W // numerics.query_tile) * numerics.num_splits
    if (needed := 4 * (page_tables.size + NUM_FACTS * tiles + NUM_LANES)) > SMEM_BYTES:
        raise InputError(
            f'the "pallas_tpu" attention has {SMEM_BYTES:,} bytes for scalars, and would need {needed:,} for page_tables of '
            f"{G} windows and {page_tables.shape[1]} pages: lower max_len or the rows of a pass, or raise Numerics.page"
        )


def tile_shape(q: jax.Array, v_pages: jax.Array, numerics: Numerics) -> TileShape:
    """The sizes of a program for `q [G, W, N, H]` and `v_pages [num_pages, K, page, H]`."""
    _, W, N, _ = q.shape
    _, K, page, H = v_pages.shape
    step_bytes = 2 * numerics.block_pages * K * page * H * v_pages.dtype.itemsize

    def whole(rows: int) -> int:
        return -(-rows // MIN_ROWS) * MIN_ROWS

    return TileShape(
        rows=whole(numerics.query_tile * (N // K)),
        used_rows=whole(min(W, numerics.query_tile) * (N // K)),
        num_buffers=min(max(1 + -(-IN_FLIGHT_BYTES // step_bytes), 2), MAX_BUFFERS),
    )


def _product_dtype(q: jax.Array, v_pages: jax.Array) -> Any:
    """The dtype of products: the cache's, or that of the queries for integers."""
    return q.dtype if v_pages.dtype == jnp.int8 else v_pages.dtype


def vmem_bytes(q: jax.Array, v_pages: jax.Array, alibi: bool, numerics: Numerics) -> int:
    """Bytes of VMEM that a program holds: the ring of pages, queries, running sums, and two blocks of input and output each."""
    _, K, page, H = v_pages.shape
    rows, used, buffers = tile_shape(q, v_pages, numerics)
    itemsize = _product_dtype(q, v_pages).itemsize
    page_bytes = K * page * H * v_pages.dtype.itemsize
    if v_pages.dtype == jnp.int8:
        page_bytes += -(-K // SUBLANES) * SUBLANES * page * 4
    ring = 2 * buffers * numerics.block_pages * page_bytes
    lse = LANE_WIDTH if numerics.num_splits > 1 else 0
    blocks = H * (itemsize + 4) + 4 * lse + (4 * LANE_WIDTH if alibi else 0)
    return ring + K * rows * H * itemsize + 4 * K * used * (H + 2 * LANE_WIDTH) + 2 * K * used * blocks


def _row_slopes(N: int, K: int, rows: int) -> jax.Array:
    """Slopes of a tile's rows in every column, `[K, rows, LANE_WIDTH]`; query heads of a KV head follow each other."""
    slopes = own_slopes(N).reshape(K, N // K)[:, np.arange(rows) % (N // K)]
    return jnp.repeat(slopes[:, :, None], LANE_WIDTH, axis=2)


def _plan_work(positions: jax.Array, page: int, sliding_window: int | None, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """The work of each tile, from the positions `[X, width]` of its rows, and which splits of it work, bool `[X, splits]`.

    Work is int32 scalars, ordered as FIRST_BLOCK and following. Split `split` of query tile `x` has index
    `x * num_splits + split`. The part TILE lists tiles with work, of which the lanes take one each in turn. After them comes
    one place for each lane, `num_tiles` and following, which a lane that has less to do writes to.
    """
    splits = numerics.num_splits
    block = numerics.block_pages
    start = positions[:, 0]
    last = positions.max(1)
    first_page = jnp.zeros_like(start) if sliding_window is None else jnp.maximum(start - sliding_window + 1, 0) // page
    steps = jnp.where(last >= 0, -(-(last // page + 1 - first_page) // block), 0)
    per_split = -(-steps // splits)
    before = jnp.arange(splits, dtype=jnp.int32)[None, :] * per_split[:, None]  # [X, splits]
    num_steps = jnp.clip(steps[:, None] - before, 0, per_split[:, None])
    works = num_steps > 0
    num_tiles = works.size
    through = jnp.cumsum(works.reshape(-1), dtype=jnp.int32)  # tiles with work up to each
    place = jnp.arange(num_tiles + NUM_LANES, dtype=jnp.int32)
    tile = (through[None, :] <= place[:, None]).sum(1, dtype=jnp.int32)  # tile of each place in the list
    tile = jnp.where(place < through[-1], tile, num_tiles + place % NUM_LANES)
    first_block = (first_page[:, None] + before * block).reshape(-1)
    facts = [first_block, num_steps.reshape(-1), jnp.repeat(start, splits), jnp.repeat(last, splits), tile]
    return jnp.concatenate(facts).astype(jnp.int32), works


def _attend_tile(
    work_ref: Any,  # [NUM_FACTS * num_tiles + NUM_LANES], see _plan_work
    tables_ref: Any,  # [G * max_pages]
    q_ref: Any,  # [K, used_rows, H]
    *refs: Any,  # pools; slopes [K, used_rows, LANE_WIDTH] with alibi; o [K, used_rows, H]; lse as slopes if split; scratch
    tiling: Tiling,
    scores: Scores,
    num_pools: int,
) -> None:
    """Attends for a tile: online softmax over the pages it needs, while the pages of following steps are in flight.

    The pools are keys and values `[num_pages, K, page, H]`, in int8 followed by their scales `[num_pages, K, page]`.
    """
    num_tiles, tiles_per_window, max_pages, Q = tiling
    sliding_window = scores.sliding_window
    first = num_pools + scores.alibi
    pool_refs = refs[:num_pools]
    slope_refs = refs[num_pools:first]
    refs = refs[first:]
    o_ref, *lse_refs, q_tile_ref = refs[: -5 - num_pools]
    ring_refs = refs[-5 - num_pools : -5]
    arrived_ref, cursor_ref, m_ref, l_ref, acc_ref = refs[-5:]
    k_ring_ref, v_ring_ref, *scale_ring_refs = ring_refs
    K, used, H = q_ref.shape
    rows = q_tile_ref.shape[1]
    buffers, block_pages, _, page, _ = k_ring_ref.shape
    lane = pl.program_id(0)
    index = pl.program_id(1)

    def of_tile(fact: int, tile: jax.Array) -> jax.Array:
        return work_ref[fact * num_tiles + tile]

    tile = of_tile(TILE, index * NUM_LANES + lane)

    def copies(slot: jax.Array, page_of: Any) -> list[Any]:
        """The DMAs of one step into ring slot `slot`; `page_of(n)` is the id of the step's n-th page."""
        return [
            pltpu.make_async_copy(hbm.at[page_of(n)], ring.at[slot, n], arrived_ref.at[which, slot])
            for n in range(block_pages)
            for which, (hbm, ring) in enumerate(zip(pool_refs, ring_refs, strict=True))
        ]

    # cursor: place in the list and step whose pages are fetched next, the slot they go to, and the slot that is multiplied next
    def fetch() -> None:
        ahead = of_tile(TILE, cursor_ref[0])

        @pl.when(ahead < num_tiles)
        def fetch_step() -> None:
            step = cursor_ref[1]
            slot = cursor_ref[2]
            block = of_tile(FIRST_BLOCK, ahead) + step * block_pages
            table = jax.lax.div(ahead, tiles_per_window) * max_pages
            for copy in copies(slot, lambda n: tables_ref[table + jnp.minimum(block + n, max_pages - 1)]):
                copy.start()
            ends = step + 1 == of_tile(NUM_STEPS, ahead)
            cursor_ref[0] += jnp.where(ends, NUM_LANES, 0)
            cursor_ref[1] = jnp.where(ends, 0, step + 1)
            cursor_ref[2] = jnp.where(slot + 1 == buffers, 0, slot + 1)

    @pl.when(index == 0)
    def fill_ring() -> None:
        cursor_ref[0] = lane
        cursor_ref[1] = cursor_ref[2] = cursor_ref[3] = 0
        for _ in range(buffers - 1):
            fetch()

    q_tile_ref[:, :used] = q_ref[...]
    if rows > used:
        q_tile_ref[:, used:] = jnp.zeros((K, rows - used, H), q_ref.dtype)
    m_ref[...] = jnp.full_like(m_ref, MASK_VALUE)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend_block(step: jax.Array, carry: None) -> None:
        fetch()
        slot = cursor_ref[3]
        cursor_ref[3] = jnp.where(slot + 1 == buffers, 0, slot + 1)
        for copy in copies(slot, lambda n: 0):
            copy.wait()
        columns = block_pages * page
        block = of_tile(FIRST_BLOCK, tile) + step * block_pages
        row = jax.lax.broadcasted_iota(jnp.int32, (used, columns), 0)
        position = jnp.minimum(of_tile(FIRST_POSITION, tile) + jax.lax.div(row, Q), of_tile(LAST_POSITION, tile))
        distance = position - (block * page + jax.lax.broadcasted_iota(jnp.int32, (used, columns), 1))
        keep = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
        for head in range(K):
            keys = _as_floats(k_ring_ref[slot, :, head], q_tile_ref.dtype).reshape(columns, H)
            values = _as_floats(v_ring_ref[slot, :, head], q_tile_ref.dtype).reshape(columns, H)
            scales = [
                jnp.concatenate([ring[slot, n, head : head + 1] for n in range(block_pages)], axis=1)  # [1, columns]
                for ring in scale_ring_refs
            ]
            score = _product(q_tile_ref[head], keys, contract=1)[:used]
            if scales:
                score = score * scales[0]
            score = score * scores.scale
            score = softcap(score, scores.cap)
            for slope_ref in slope_refs:
                score = lower_scores(score, slope_ref[head, :, :1], distance)
            score = jnp.where(keep, score, MASK_VALUE)
            m_prev = m_ref[head]
            m_next = jnp.maximum(m_prev, score.max(1, keepdims=True))
            rescale = jnp.exp(m_prev - m_next)
            p = jnp.where(keep, jnp.exp(score - m_next[:, :1]), 0.0)
            m_ref[head] = m_next
            l_ref[head] = l_ref[head] * rescale + p.sum(1, keepdims=True)
            if scales:
                p = p * scales[1]
            p = p.astype(values.dtype)
            if rows > used:
                p = jnp.concatenate([p, jnp.zeros((rows - used, columns), p.dtype)])
            acc_ref[head] = acc_ref[head] * rescale[:, :1] + _product(p, values, contract=0)[:used]

    num_steps = of_tile(NUM_STEPS, jnp.minimum(tile, num_tiles - 1))
    jax.lax.fori_loop(0, jnp.where(tile < num_tiles, num_steps, 0), attend_block, None)  # a lane may have one less
    l = l_ref[...]
    attended_anything = l > 0
    l = jnp.where(attended_anything, l, 1.0)
    o_ref[...] = acc_ref[...] / l[..., :1]
    if lse_refs:
        lse_refs[0][...] = jnp.where(attended_anything, m_ref[...] + jnp.log(l), MASK_VALUE)


def _as_floats(block: jax.Array, dtype: Any) -> jax.Array:
    """Keys or values of a block, integers as the same numbers of `dtype`; they are exact in bfloat16."""
    return block.astype(jnp.float32).astype(dtype) if block.dtype == jnp.int8 else block


def _product(a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    """Product of `a [m, k]` and `b` over axis `contract` of `b`, in float32; float32 operands are not rounded to bfloat16."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
