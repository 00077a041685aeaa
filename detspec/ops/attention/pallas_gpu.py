"""Attention over a paged cache as one Mosaic GPU kernel for Hopper, for canonical passes and for fast decode."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detspec.config import Schedule
from detspec.errors import InputError
from detspec.ops.attention.reference import MASK_VALUE
from detspec.ops.attention.splits import merge_splits

M = 64  # rows of one warpgroup's matrix product
MAX_WARPGROUPS = 2
MAX_SLOTS = 6
MIN_SLOTS = 3
OUT_COLUMNS = 64
SMEM_BYTES = 227 * 1024
LOG2E = math.log2(math.e)


def paged_attention(q, k_pages, v_pages, page_tables, positions, *, scale, cap, sliding_window, schedule):
    G, W, N, H = q.shape
    K, page = v_pages.shape[1], v_pages.shape[2]
    Q = N // K
    tile = schedule.query_tile
    warpgroups = -(-tile * Q // M)
    rows = warpgroups * M
    block_pages = schedule.block_pages
    block = block_pages * page
    num_splits = schedule.num_splits
    tiles = -(-W // tile)
    X = G * tiles
    given = min(W, tile)
    io_rows = -(-given * Q // 8) * 8
    max_pages = page_tables.shape[1]
    slots = 4

    padded = tiles * given
    q = jnp.pad(q, ((0, 0), (0, padded - W), (0, 0), (0, 0)))
    q = q.reshape(X, given, K, Q, H).transpose(0, 2, 1, 3, 4).reshape(X, K, given * Q, H).astype(k_pages.dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, io_rows - given * Q), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, padded - W)), mode="edge").reshape(X, given)
    row_position = jnp.pad(jnp.repeat(positions, Q, axis=1), ((0, 0), (0, rows - given * Q)), mode="edge")

    columns = H if H <= 128 else 128 if H % 128 == 0 else 64

    def kernel(q_ref, k_ref, v_ref, tables_ref, position_ref, o_ref, *rest):
        if num_splits > 1:
            m_ref, l_ref, *scratch = rest
        else:
            scratch = rest
        q_smem, position_smem, kv_smem, p_smem, out_smem, *scratch = scratch
        stats_smem = scratch.pop(0) if num_splits > 1 else None
        q_barrier, full, empty = scratch
        head, split, x = (lax.axis_index(name) for name in ("head", "split", "x"))
        wg = lax.axis_index("wg")
        first_page = jnp.int32(0)
        if sliding_window is not None:
            first_page = lax.div(jnp.maximum(position_ref[x, 0] - (sliding_window - 1), 0), jnp.int32(page))
        last_page = lax.div(position_ref[x, rows - 1] + page, jnp.int32(page)) - 1
        num_blocks = lax.div(last_page - first_page + block_pages, jnp.int32(block_pages))
        if num_splits > 1:
            per_split = lax.div(num_blocks + (num_splits - 1), jnp.int32(num_splits))
            first_page += split * per_split * block_pages
            num_blocks = jnp.clip(num_blocks - split * per_split, 0, per_split)

        @pl.when(wg == warpgroups)
        def load():
            @pl.loop(0, num_blocks)
            def _(step):
                for which, pages_ref in enumerate((k_ref, v_ref)):
                    n = 2 * step + which
                    slot = lax.rem(n, jnp.int32(slots))

                    @pl.when(n >= slots)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for i in range(block_pages):
                        place = jnp.minimum(first_page + step * block_pages + i, last_page)
                        page_id = tables_ref[lax.div(x, jnp.int32(tiles)), place]
                        plgpu.copy_gmem_to_smem(
                            pages_ref.at[page_id, head], kv_smem.at[slot, pl.ds(i * page, page)], full.at[slot]
                        )

        @pl.when(wg < warpgroups)
        def compute():
            q_wg, p_wg, out_wg = q_smem.at[wg], p_smem.at[wg], out_smem.at[wg]
            for w in range(warpgroups):
                count = min(max(io_rows - w * M, 0), M)

                @pl.when(wg == w)
                def _():
                    if count < M:
                        q_wg[...] = jnp.zeros((M, H), q_wg.dtype)
                        plgpu.commit_smem()
                    if count:
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[x, head, pl.ds(w * M, count)], q_smem.at[w, pl.ds(0, count)], q_barrier.at[w]
                        )
                    else:
                        plgpu.barrier_arrive(q_barrier.at[w])
                    plgpu.copy_gmem_to_smem(position_ref.at[x, pl.ds(w * M, M)], position_smem.at[w], q_barrier.at[w])

            plgpu.barrier_wait(q_barrier.at[wg])
            position = position_smem[wg]

            def step_fn(step, carry):
                m_prev, l_prev, o_prev = carry
                k_slot, v_slot = (lax.rem(2 * step + i, jnp.int32(slots)) for i in range(2))
                plgpu.barrier_wait(full.at[k_slot])

                def qk(acc):
                    plgpu.wgmma(acc, q_wg, plgpu.transpose_ref(kv_smem.at[k_slot], (1, 0)))
                    return acc[...]

                if schedule.interpret:
                    scores = lax.dot_general(
                        q_wg[...], kv_smem[k_slot], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                    )
                else:
                    scores = pl.run_scoped(qk, plgpu.ACC((M, block), jnp.float32))
                plgpu.barrier_arrive(empty.at[k_slot])
                scores = scores * (scale * LOG2E)
                start = (first_page + step * block_pages) * page
                distance = lax.broadcast_in_dim(position - start, (M, block), (0,)) - lax.broadcasted_iota(
                    jnp.int32, (M, block), 1
                )
                keep = distance >= 0
                if sliding_window is not None:
                    keep = keep & (distance < sliding_window)
                scores = jnp.where(keep, scores, MASK_VALUE)
                m_next = jnp.maximum(m_prev, scores.max(axis=1))
                rescale = jnp.exp2(m_prev - m_next)
                p = jnp.exp2(scores - lax.broadcast_in_dim(jnp.maximum(m_next, MASK_VALUE / 2), (M, block), (0,)))
                l_next = l_prev * rescale + p.sum(axis=1)
                p_wg[...] = p.astype(p_wg.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(full.at[v_slot])
                o_next = []
                for c, o in enumerate(o_prev):

                    def pv(acc):
                        plgpu.wgmma(acc, p_wg, kv_smem.at[v_slot, :, pl.ds(c * columns, columns)])
                        return acc[...]

                    o_next.append(
                        o * lax.broadcast_in_dim(rescale, (M, columns), (0,))
                        + pl.run_scoped(pv, plgpu.ACC((M, columns), jnp.float32))
                    )
                plgpu.barrier_arrive(empty.at[v_slot])
                return m_next, l_next, tuple(o_next)

            m = jnp.full((M,), MASK_VALUE, jnp.float32)
            l = jnp.zeros((M,), jnp.float32)
            o = tuple(jnp.zeros((M, columns), jnp.float32) for _ in range(H // columns))
            m, l, o = lax.fori_loop(0, num_blocks, step_fn, (m, l, o))
            if num_splits == 1:
                l = jnp.where(l == 0, 1.0, l)
                o = tuple(x / lax.broadcast_in_dim(l, (M, columns), (0,)) for x in o)
            for c in range(H // OUT_COLUMNS):
                which, start = divmod(c * OUT_COLUMNS, columns)
                out_wg[...] = lax.slice(o[which], (0, start), (M, start + OUT_COLUMNS))
                plgpu.commit_smem()
                for w in range(warpgroups):
                    count = min(max(io_rows - w * M, 0), M)
                    if count:

                        @pl.when(wg == w)
                        def _():
                            plgpu.copy_smem_to_gmem(
                                out_smem.at[w, pl.ds(0, count)],
                                o_ref.at[x, split, head, pl.ds(w * M, count), pl.ds(c * OUT_COLUMNS, OUT_COLUMNS)],
                            )
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if num_splits > 1:
                stats_wg = stats_smem.at[wg]
                stats_wg[0] = m
                stats_wg[1] = l
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stats_wg.at[0], m_ref.at[x, split, head, pl.ds(wg * M, M)])
                plgpu.copy_smem_to_gmem(stats_wg.at[1], l_ref.at[x, split, head, pl.ds(wg * M, M)])
            plgpu.wait_smem_to_gmem(0)

    dtype = k_pages.dtype
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiled32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    scratch = [
        plgpu.SMEM((warpgroups, M, H), dtype, transforms=tiled),
        plgpu.SMEM((warpgroups, M), jnp.int32),
        plgpu.SMEM((slots, block, H), dtype, transforms=tiled),
        plgpu.SMEM((warpgroups, M, block), dtype, transforms=tiled),
        plgpu.SMEM((warpgroups, M, OUT_COLUMNS), jnp.float32, transforms=tiled32),
        *([plgpu.SMEM((warpgroups, 2, M), jnp.float32)] if num_splits > 1 else []),
        plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
        plgpu.Barrier(num_arrivals=block_pages, num_barriers=slots),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots),
    ]

    def body(*refs):
        pl.run_scoped(partial(kernel, *refs), *scratch, collective_axes="wg")

    out = [jax.ShapeDtypeStruct((X, num_splits, K, io_rows, H), jnp.float32)]
    if num_splits > 1:
        out += [jax.ShapeDtypeStruct((X, num_splits, K, rows), jnp.float32)] * 2
    mesh = plgpu.Mesh(
        grid=(K, num_splits, X), grid_names=("head", "split", "x"), num_threads=warpgroups + 1, thread_name="wg"
    )
    interpret: Any = False
    if schedule.interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret = InterpretGPUParams(detect_races=True)
    outs = pl.kernel(
        body,
        out,
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        name="paged_attention",
    )(q, k_pages, v_pages, page_tables, row_position)
    if num_splits > 1:
        o, m, l = outs
        l, o = merge_splits(m[..., :io_rows] / LOG2E, l[..., :io_rows], o)
        o = o / jnp.where(l == 0, 1.0, l)[..., None]
    else:
        o = outs[0][:, 0]
    o = o[:, :, : given * Q].reshape(G, tiles, K, given, Q, H).transpose(0, 1, 3, 2, 4, 5)
    return o.reshape(G, padded, N, H)[:, :W]
