"""Attention over a paged cache for Hopper GPUs, in Pallas (Mosaic GPU).

1. Queries are cut into tiles of `query_tile` positions of one window. A CTA of the grid handles one KV head of one tile, or one
   split of it, over the pages the tile needs, ascending. Pages past the tile or before its sliding window are not read. A CTA
   without pages, for padding or a split of a short sequence, returns at once and writes nothing.
2. For every `W`, a tile has `query_tile * Q` rows rounded up to `ROWS`, the rows of a wgmma. Rows that a short window lacks are
   zeros in shared memory, neither read nor written. So each row meets one shape of product, and the result does not depend on
   how rows were split into windows. Each compute warpgroup takes `ROWS` rows; all share the keys and values.
3. One more warpgroup only fetches, by TMA, into a ring. Its slots hold the keys and the values of steps alternately:

       page         0     1     2
       fetched    k0 v0 k1 v1 k2 v2
       ring slot   0  1  2  0  1  2       num_slots 3: while v0 is multiplied, k1 is there and v1 waits for k0's slot

Estimate for a page of 128 slots and H 128: an SM's share of 4.3 TB/s is 33 GB/s, so a step's 64 KiB take 2.0 us. A latency of
1 us needs 33 KiB in flight; the ring holds 5 slots of 32 KiB. A step's products take 1024 cycles of the tensor cores, even if
few of the `ROWS` rows are used; its exponentials take 512 cycles. Together that is about 1.1 us: decode waits for memory. In
prefill, one warpgroup leaves the tensor cores idle during its softmax; two take turns, and halve the traffic from L2 per FLOP.
So fast prefill needs `query_tile * Q` of 128.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.errors import InputError
from detspec.ops.alibi import lower_scores, own_slopes
from detspec.ops.attention.reference import MASK_VALUE
from detspec.ops.attention.scores import Scores
from detspec.ops.attention.tiles import by_position, put_together, tile_positions
from detspec.ops.gpu_simulator import simulator
from detspec.schedule import Numerics

ROWS = 64  # M of a wgmma
MAX_WARPGROUPS = 2  # compute warpgroups: the accumulators of a third would not fit into the registers
MAX_COLUMNS = 128  # columns of an accumulator of values; wider heads have several
OUT_COLUMNS = 64  # columns of the result that are copied out at a time
MAX_BLOCK = 256  # slots of a step: N of a wgmma
COPY_ROWS = 8  # rows that lie together in swizzled shared memory
MIN_SLOTS = 3  # slots of the ring: with fewer, nothing is fetched during half of a step
MAX_SLOTS = 12
ALIGNMENT = 1024  # alignment of a buffer in shared memory
SMEM_BYTES = 227 << 10  # shared memory of an SM that one CTA may have
DTYPES = (jnp.bfloat16, jnp.float16)
LOG2E = math.log2(math.e)


class CtaShape(NamedTuple):
    """Sizes of a CTA."""

    warpgroups: int  # compute warpgroups of ROWS rows each
    used_rows: int  # rows of each warpgroup that a window can fill
    num_slots: int  # slots of the ring


class SplitWork(NamedTuple):
    """Pages and steps of a split of a tile."""

    first_page: jax.Array
    last_page: jax.Array  # last page of the whole tile; -1 without a position
    num_steps: jax.Array  # steps of `block_pages` pages; 0 if there is nothing to do


@partial(jax.jit, static_argnames=("scores", "numerics"))  # layers of one shape are lowered once
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    scores: Scores,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array | None]:
    """See `api.attention_and_lse`; keys are `[num_pages, K, page, H]`, the cache is bfloat16 or float16."""
    check(q, v_pages, numerics)
    q_shape = G, W, N, H = q.shape
    K, page = v_pages.shape[1:3]
    Q = N // K
    splits = numerics.num_splits
    shape = cta_shape(q, v_pages, numerics)
    width = min(W, numerics.query_tile)  # positions of a tile that a window can fill
    tiles = -(-W // numerics.query_tile)
    X = G * tiles
    rows = shape.warpgroups * ROWS
    used = shape.warpgroups * shape.used_rows

    # [G, W, N, H] -> [X, K, used, H]
    q = jnp.pad(q, ((0, 0), (0, tiles * width - W), (0, 0), (0, 0))).astype(k_pages.dtype)
    q = q.reshape(X, width, K, Q, H).transpose(0, 2, 1, 3, 4).reshape(X, K, width * Q, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, used - width * Q), (0, 0)))
    positions = tile_positions(positions, tiles, width)
    work_of = partial(_work_of, page=page, scores=scores, numerics=numerics)
    split = jnp.arange(splits, dtype=jnp.int32)[None, :]
    works = work_of(positions[:, :1], positions[:, -1:], split).num_steps > 0  # [X, splits]
    positions = jnp.pad(jnp.repeat(positions, Q, axis=1), ((0, 0), (0, rows - width * Q)), mode="edge")

    block = numerics.block_pages * page
    swizzled = [(plgpu.TilingTransform((COPY_ROWS, 128 // size)), plgpu.SwizzleTransform(128)) for size in (2, 4)]
    scratch = [
        plgpu.SMEM((shape.num_slots, block, H), k_pages.dtype, transforms=swizzled[0]),
        plgpu.SMEM((shape.warpgroups, ROWS, H), k_pages.dtype, transforms=swizzled[0]),
        plgpu.SMEM((shape.warpgroups, ROWS, block), k_pages.dtype, transforms=swizzled[0]),
        plgpu.SMEM((shape.warpgroups, ROWS, OUT_COLUMNS), jnp.float32, transforms=swizzled[1]),
        plgpu.SMEM((shape.warpgroups, ROWS), jnp.int32),
        plgpu.SMEM((shape.warpgroups, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=3 if scores.alibi else 2, num_barriers=shape.warpgroups),
        plgpu.Barrier(num_arrivals=numerics.block_pages, num_barriers=shape.num_slots),
        plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=shape.num_slots),
    ]
    attend_tile = partial(_attend_tile, scores=scores, numerics=numerics)

    def kernel(*refs: Any) -> None:
        positions_ref = refs[4]
        x = jax.lax.axis_index("tile")
        work = work_of(positions_ref[x, 0], positions_ref[x, rows - 1], jax.lax.axis_index("split"))

        # Equal for all threads of a CTA: either all meet at its barriers or none.
        @pl.when(work.num_steps > 0)
        def attend() -> None:
            pl.run_scoped(partial(attend_tile, work, refs), *scratch, collective_axes="warpgroup")

    operands = [q, k_pages, v_pages, page_tables, positions, *([_log2_slopes(N, K, rows)] if scores.alibi else [])]
    results = [jax.ShapeDtypeStruct((X, splits, K, used, H), jnp.float32)]
    if splits > 1 or scores.lse:  # and the logarithm of each row's sum of exponentials
        results.append(jax.ShapeDtypeStruct((X, splits, K, rows), jnp.float32))
    slots = X * page_tables.shape[1] * page  # as if every table were full
    # The last axis of the grid runs fastest: tiles of one window read the same pages at about the same time.
    attended, *of_splits = pl.kernel(
        kernel,
        results,
        mesh=plgpu.Mesh(
            grid=(K, splits, X), grid_names=("head", "split", "tile"), num_threads=shape.warpgroups + 1, thread_name="warpgroup"
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * K * H * slots,
            transcendentals=rows * K * slots,
            bytes_accessed=2 * K * H * slots * k_pages.dtype.itemsize + q.nbytes + 4 * q.size * splits,
        ),
        interpret=simulator() if numerics.interpret else False,
        name="paged_attention",
    )(*operands)
    attended = attended[:, :, :, : width * Q]
    attended, lse = put_together(works, attended, of_splits[0][..., : width * Q] if of_splits else None)
    found_lse = by_position(lse[..., None], q_shape, tiles)[..., 0] if lse is not None and scores.lse else None
    return by_position(attended, q_shape, tiles), found_lse


def check(q: jax.Array, v_pages: jax.Array, numerics: Numerics) -> None:
    """Raises `InputError`, naming the argument, for what the kernel does not support; shapes as in `api.paged_attention`."""
    K, page, H = v_pages.shape[1:]
    Q = q.shape[2] // K
    tile = numerics.query_tile
    if v_pages.dtype not in DTYPES:
        raise InputError(f'the "pallas_gpu" attention takes a bfloat16 or float16 cache, got cache_dtype {v_pages.dtype}')
    if H not in (64, 128, 192, 256):
        raise InputError(
            f'the "pallas_gpu" attention takes a head_dim of 64, 128, 192 or 256, got {H}: '
            'use Schedule(Numerics(implementation="reference"))'
        )
    if page % 64:
        raise InputError(f'the "pallas_gpu" attention takes pages of a multiple of 64 slots, got Numerics.page {page}')
    if numerics.block_pages * page > MAX_BLOCK:
        raise InputError(
            f'the "pallas_gpu" attention takes at most {MAX_BLOCK} slots per step, got block_pages {numerics.block_pages} of '
            f"Numerics.page {page}: lower one of these"
        )
    if tile * Q > MAX_WARPGROUPS * ROWS:
        raise InputError(
            f'the "pallas_gpu" attention has registers for {MAX_WARPGROUPS * ROWS} query rows in a tile, got query_tile {tile} '
            f"of {Q} heads a KV head: lower query_tile"
        )
    if (needed := smem_bytes(q, v_pages, numerics)) > SMEM_BYTES:
        raise InputError(
            f'the "pallas_gpu" attention has {SMEM_BYTES:,} bytes of shared memory, and would need {needed:,} for a head_dim '
            f"of {H}, pages of {page}, block_pages {numerics.block_pages}, query_tile {tile}: lower one of these"
        )


def cta_shape(q: jax.Array, v_pages: jax.Array, numerics: Numerics) -> CtaShape:
    """The sizes of a CTA for `q [G, W, N, H]` and `v_pages [num_pages, K, page, H]`: as many slots as fit."""
    W = q.shape[1]
    Q = q.shape[2] // v_pages.shape[1]
    fixed, slot = _smem_parts(v_pages, numerics, Q)
    used = min(ROWS, min(W, numerics.query_tile) * Q)
    return CtaShape(
        warpgroups=_warpgroups(numerics, Q),
        used_rows=-(-used // COPY_ROWS) * COPY_ROWS,
        num_slots=min(max((SMEM_BYTES - fixed) // slot, MIN_SLOTS), MAX_SLOTS),
    )


def smem_bytes(q: jax.Array, v_pages: jax.Array, numerics: Numerics) -> int:
    """Bytes of shared memory that a CTA holds: the ring, queries, probabilities, results being copied out, and scratch."""
    fixed, slot = _smem_parts(v_pages, numerics, q.shape[2] // v_pages.shape[1])
    return fixed + cta_shape(q, v_pages, numerics).num_slots * slot


def _warpgroups(numerics: Numerics, Q: int) -> int:
    return -(-numerics.query_tile * Q // ROWS)


def _smem_parts(v_pages: jax.Array, numerics: Numerics, Q: int) -> tuple[int, int]:
    """Bytes of shared memory without the ring, and bytes of one slot of the ring."""
    page, H = v_pages.shape[2:]
    size = v_pages.dtype.itemsize
    block = numerics.block_pages * page
    small = 5 * ALIGNMENT  # positions, sums, barriers, and the compiler's buffer for sums over a row
    return _warpgroups(numerics, Q) * ROWS * (H * size + block * size + OUT_COLUMNS * 4) + small, block * H * size


def _work_of(
    first: jax.Array, last: jax.Array, split: jax.Array, *, page: int, scores: Scores, numerics: Numerics
) -> SplitWork:
    """Pages of split number `split` of a tile of positions `first` to `last`; all int32, scalars or arrays."""
    block_pages = numerics.block_pages
    last_page = jax.lax.div(last + page, page) - 1
    first_page = jnp.zeros_like(first)
    if scores.sliding_window is not None:
        first_page = jax.lax.div(jnp.maximum(first - scores.sliding_window + 1, 0), page)
    num_steps = jax.lax.div(last_page - first_page + block_pages, block_pages)
    if numerics.num_splits > 1:
        per_split = jax.lax.div(num_steps + numerics.num_splits - 1, numerics.num_splits)
        first_page = first_page + split * per_split * block_pages
        num_steps = jnp.clip(num_steps - split * per_split, 0, per_split)
    return SplitWork(first_page, last_page, num_steps)


def _attend_tile(work: SplitWork, refs: tuple[Any, ...], *scratch_refs: Any, scores: Scores, numerics: Numerics) -> None:
    """Runs a warpgroup of a CTA: the last one fetches the pages that the others compute with.

    `refs` are those of queries `[X, K, used, H]`, keys and values `[num_pages, K, page, H]`, page tables `[G, max_pages]`,
    positions `[X, rows]`, slopes `[K, rows]` with linear biases, and the results, `[X, splits, K, used, H]` and, if sums of
    exponentials are wanted, `[X, splits, K, rows]`.
    """
    q_ref, k_ref, v_ref, tables_ref, positions_ref, *more_refs = refs
    slopes_refs = more_refs[: scores.alibi]
    o_ref, *lse_refs = more_refs[scores.alibi :]
    ring_ref, q_tile_ref, p_ref, out_ref, position_ref, numbers_ref, queries, arrived, free = scratch_refs
    num_slots, block, H = ring_ref.shape
    page = k_ref.shape[2]
    rows = positions_ref.shape[1]
    tiles = positions_ref.shape[0] // tables_ref.shape[0]  # tiles per window
    block_pages = numerics.block_pages
    sliding_window = scores.sliding_window
    warpgroups = rows // ROWS
    used = q_ref.shape[2] // warpgroups
    head, split, x, warpgroup = (jax.lax.axis_index(name) for name in ("head", "split", "tile", "warpgroup"))
    first_page, last_page, num_steps = work

    def slots(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The ring slots of the keys and of the values of `step`."""
        return jax.lax.rem(2 * step, num_slots), jax.lax.rem(2 * step + 1, num_slots)

    def fetch(step: jax.Array, _: None) -> None:
        block_page = first_page + step * block_pages
        # A partial last block repeats its last page, which is masked: no table entry past the window's pages is read.
        page_ids = [tables_ref[jax.lax.div(x, tiles), jnp.minimum(block_page + n, last_page)] for n in range(block_pages)]
        for which, (pages_ref, slot) in enumerate(zip((k_ref, v_ref), slots(step), strict=True)):

            @pl.when(2 * step + which >= num_slots)
            def wait_for_slot(slot: jax.Array = slot) -> None:
                plgpu.barrier_wait(free.at[slot])

            for n, page_id in enumerate(page_ids):
                place = ring_ref.at[slot, pl.ds(n * page, page)]
                plgpu.copy_gmem_to_smem(pages_ref.at[page_id, head], place, arrived.at[slot])

    @pl.when(warpgroup == warpgroups)
    def fetch_all() -> None:
        if warpgroups > 1:
            plgpu.set_max_registers(40, action="decrease")
        jax.lax.fori_loop(0, num_steps, fetch, None)

    @pl.when(warpgroup < warpgroups)
    def attend_all() -> None:
        if warpgroups > 1:
            plgpu.set_max_registers(232, action="increase")
        q_rows, p_rows, out_rows = (ref.at[warpgroup] for ref in (q_tile_ref, p_ref, out_ref))
        if used < ROWS:
            q_rows[...] = jnp.zeros((ROWS, H), q_ref.dtype)
            plgpu.commit_smem()
        ours = pl.ds(warpgroup * used, used)
        plgpu.copy_gmem_to_smem(q_ref.at[x, head, ours], q_rows.at[pl.ds(0, used)], queries.at[warpgroup])
        all_rows = pl.ds(warpgroup * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(positions_ref.at[x, all_rows], position_ref.at[warpgroup], queries.at[warpgroup])
        for slopes_ref in slopes_refs:  # they use the buffer of the outgoing sums
            plgpu.copy_gmem_to_smem(slopes_ref.at[head, all_rows], numbers_ref.at[warpgroup], queries.at[warpgroup])
        plgpu.barrier_wait(queries.at[warpgroup])
        position = position_ref[warpgroup]
        slopes = numbers_ref[warpgroup] if scores.alibi else None
        columns = math.gcd(H, MAX_COLUMNS)
        product = partial(_product, interpret=numerics.interpret)

        def attend_block(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            m_prev, l_prev, o_prev = carry
            k_slot, v_slot = slots(step)
            plgpu.barrier_wait(arrived.at[k_slot])
            # Wide heads: the compiler must not know this 0, or it holds the addresses of all 16 parts of the queries in 20
            # registers during the whole loop, and spills sums instead.
            zero = jax.lax.div(step, jnp.int32(1 << 30)) if H > MAX_COLUMNS else 0
            score = product(q_tile_ref.at[warpgroup + zero], ring_ref.at[k_slot], transpose_b=True)
            plgpu.barrier_arrive(free.at[k_slot])
            score = _log2_scores(score, scores.scale, scores.cap)
            column = jax.lax.broadcasted_iota(jnp.int32, (ROWS, block), 1)
            distance = _across(position - (first_page + step * block_pages) * page, block) - column
            keep = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
            if slopes is not None:
                score = lower_scores(score, _across(slopes, block), distance)
            score = jnp.where(keep, score, MASK_VALUE)
            m_next = jnp.maximum(m_prev, score.max(axis=1))
            rescale = jnp.exp2(m_prev - m_next)
            # The bound lies above every masked score: a row without keys so far gets probability 0, not exp2(0).
            p = jnp.exp2(score - _across(jnp.maximum(m_next, MASK_VALUE / 2), block))
            l_next = l_prev * rescale + p.sum(axis=1)
            p_rows[...] = p.astype(p_ref.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(arrived.at[v_slot])
            o_next = []
            for start, o in zip(range(0, H, columns), o_prev, strict=True):
                values = ring_ref.at[v_slot, :, pl.ds(start, columns)]
                o_next.append(o * _across(rescale, columns) + product(p_rows, values, transpose_b=False))
            plgpu.barrier_arrive(free.at[v_slot])
            return m_next, l_next, tuple(o_next)

        m = jnp.full((ROWS,), MASK_VALUE, jnp.float32)
        l = jnp.zeros((ROWS,), jnp.float32)
        o = tuple(jnp.zeros((ROWS, columns), jnp.float32) for _ in range(0, H, columns))
        m, l, o = jax.lax.fori_loop(0, num_steps, attend_block, (m, l, o))
        divisor = jnp.where(l == 0, 1.0, l)  # keeps rows that attend to nothing finite; they are not used
        for start in range(0, H, OUT_COLUMNS):
            part, begin = divmod(start, columns)
            attended = jax.lax.slice(o[part], (0, begin), (ROWS, begin + OUT_COLUMNS))
            out_rows[...] = attended / _across(divisor, OUT_COLUMNS)
            plgpu.commit_smem()
            place = o_ref.at[x, split, head, ours, pl.ds(start, OUT_COLUMNS)]
            plgpu.copy_smem_to_gmem(out_rows.at[pl.ds(0, used)], place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for lse_ref in lse_refs:
            numbers_ref[warpgroup] = jnp.where(l == 0, MASK_VALUE, m / LOG2E + jnp.log(divisor))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(numbers_ref.at[warpgroup], lse_ref.at[x, split, head, all_rows])
        plgpu.wait_smem_to_gmem(0)


def _product(a_ref: Any, b_ref: Any, *, transpose_b: bool, interpret: bool) -> jax.Array:
    """`a [m, k]` times `b [k, n]`, or `b [n, k]` transposed, both in shared memory: `[m, n]` float32, by wgmma.

    When interpreted it is XLA's product: the simulator uses NumPy's, which rounds a row by its place, and in jax 0.10 takes
    no transposed operand.
    """
    if interpret:
        contract = ((1,), (1 if transpose_b else 0,))
        return jax.lax.dot_general(a_ref[...], b_ref[...], (contract, ((), ())), preferred_element_type=jnp.float32)
    if transpose_b:
        b_ref = b_ref.T

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a_ref, b_ref)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a_ref.shape[0], b_ref.shape[1]), jnp.float32))


def _log2_scores(products: jax.Array, scale: float, cap: float | None) -> jax.Array:
    """Capped scores in units of log 2. tanh is computed by exp2: the hardware's approximate tanh has only 11 correct bits."""
    if cap is None:
        return products * (scale * LOG2E)
    return cap * LOG2E - (2 * cap * LOG2E) / (1 + jnp.exp2(products * (2 * LOG2E * scale / cap)))


def _log2_slopes(N: int, K: int, rows: int) -> jax.Array:
    """Slopes of a tile's rows in units of log 2, `[K, rows]`; query heads of a KV head follow each other."""
    return own_slopes(N).reshape(K, N // K)[:, np.arange(rows) % (N // K)] * np.float32(LOG2E)


def _across(row_values: jax.Array, columns: int) -> jax.Array:
    """Copies `row_values [rows]` into each of `columns`: `[rows, columns]`."""
    return jax.lax.broadcast_in_dim(row_values, (row_values.shape[0], columns), (0,))
