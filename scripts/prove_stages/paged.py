"""Operands of attention over pages: random where they are read, poisoned where they must not be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_shapes import AttentionShape

from detspec.config import ModelConfig
from detspec.model.dense import with_fields
from detspec.ops.attention.api import NO_POSITION
from detspec.ops.attention.scores import Scores
from detspec.presets import preset
from detspec.schedule import Schedule
from prove_stages.programs import Program, Setting
from prove_stages.sizes import SMALL

STALE = 1e30  # in unused slots of values: they are multiplied with zeros, so they must be finite
SPARE_PAGES = 3  # pages that no table names, full of nan


def attention_shape(layer: str, groups: int, window: int, max_len: int, *, decode: bool = False) -> AttentionShape:
    """Attention of a layer named "llama3_1_8b/full", "gemma3_1b/sliding" or "small", as `tests/aot/kernel_shapes.py` has it."""
    model, _, kind = layer.partition("/")
    cfg = (
        with_fields(SMALL, sliding_window=33, sliding_layers=(True,) * SMALL.num_layers) if model == "small" else preset(model)
    )
    scores = Scores(
        cfg.layer(0).mixer.scores.scale, cfg.layer(0).mixer.softcap, cfg.kinds[-1].mixer.window if kind == "sliding" else None
    )
    name = f"{layer}/{'decode ' if decode else ''}{groups}x{window} at {max_len}"
    return of_model(cfg, name, groups, window, max_len, decode=decode, scores=scores)


def of_model(
    cfg: ModelConfig, name: str, groups: int, window: int, max_len: int, *, decode: bool = False, scores: Scores | None = None
) -> AttentionShape:
    """Attention of the full layers of `cfg`, unless `scores` says otherwise."""
    mixer = cfg.layer(0).mixer
    return AttentionShape(
        name=name,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        scores=scores or Scores(mixer.scores.scale),
        groups=groups,
        window=window,
        max_len=max_len,
        decode=decode,
        cfg=cfg,
    )


def schedule_of(shape: AttentionShape, setting: Setting) -> Schedule:
    """The schedule under which a device runs `shape`."""
    schedule = setting.schedule_fn(shape.cfg).with_budget(shape.groups * shape.window, shape.window)
    return schedule.fast(shape.groups) if shape.decode else schedule


def attention_program(shape: AttentionShape, schedule: Schedule, *, poisoned: bool = False, calls: int = 50) -> Program:
    """Windows at the end of `max_len` positions; with `poisoned`, all that they do not attend to is nan or large."""
    return Program(
        shape.name,
        shape.function(schedule),
        lambda: operands(shape, schedule, poisoned=poisoned),
        numerics=schedule.numerics,
        work=shape.work(schedule),
        calls=calls,
    )


def operands(shape: AttentionShape, schedule: Schedule, *, poisoned: bool) -> tuple[jax.Array, ...]:
    """Queries, pages of keys and values, scattered tables, and positions.

    Poisoned: pages that no table names and unused slots of keys are nan, unused slots of values are large, and the last of
    several windows only pads the pass.
    """
    q_shape, _, v_shape, tables_shape, _ = shape.operands(schedule)
    num_pages = v_shape.shape[0] + SPARE_PAGES * poisoned
    page = schedule.numerics.page
    tables = table_of(shape, schedule)
    q = jax.random.normal(jax.random.key(1), q_shape.shape, q_shape.dtype)
    pools = [jax.random.normal(jax.random.key(n), (num_pages, *v_shape.shape[1:]), v_shape.dtype) for n in (2, 3)]
    lanes = np.arange(v_shape.shape[3]) < shape.head_dim  # beyond a head, the cache holds zeros
    keys, values = (pool * jnp.asarray(lanes, pool.dtype)[None, None, None] for pool in pools)
    positions = np.broadcast_to(np.arange(shape.max_len - shape.window, shape.max_len), (shape.groups, shape.window)).copy()
    if poisoned:
        used = np.zeros((num_pages, page), bool)
        for row in tables:
            used[row] |= (np.arange(row.size * page) < shape.max_len).reshape(-1, page)
        used[0] = True  # the scratch page holds what padding writes, which is finite
        spare = np.zeros(num_pages, bool)
        spare[v_shape.shape[0] :] = True
        stale = np.where(spare, np.nan, STALE)[:, None]
        keys = jnp.where(jnp.asarray(used)[:, None, :, None], keys, jnp.asarray(np.nan, keys.dtype))
        values = jnp.where(jnp.asarray(used)[:, None, :, None], values, jnp.asarray(stale, values.dtype)[:, None, :, None])
        if shape.groups > 1 and shape.window > 1:
            positions[-1] = NO_POSITION
    keys = jnp.moveaxis(keys, 2, schedule.numerics.key_slot_axis)
    assert tables.shape == tables_shape.shape
    return q, keys, values, jnp.asarray(tables, jnp.int32), jnp.asarray(positions, jnp.int32)


def table_of(shape: AttentionShape, schedule: Schedule) -> np.ndarray:
    """Page tables `[G, max_pages]`, pages in no order; page 0 is scratch."""
    max_pages = schedule.numerics.num_pages(shape.max_len)
    order = np.random.default_rng(0).permutation(shape.groups * max_pages)
    return 1 + order.reshape(shape.groups, max_pages).astype(np.int32)


def exact(shape: AttentionShape, schedule: Schedule, args: tuple[Any, ...]) -> np.ndarray:
    """`[G, W, N, H]` of the same operands in float64; nan where a window only pads."""
    q, keys, values, tables, positions = (np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for x in args)
    keys = np.moveaxis(keys, schedule.numerics.key_slot_axis, 2)
    out = np.full(q.shape, np.nan)
    Q = shape.num_heads // shape.num_kv_heads
    seen = np.arange(shape.max_len)
    for g in range(shape.groups):
        if positions[g, 0] == NO_POSITION:
            continue
        k, v = (
            np.moveaxis(pool[tables[g]], 2, 1).reshape(-1, *pool.shape[1:2], pool.shape[3])[
                : shape.max_len, :, : shape.head_dim
            ]
            for pool in (keys, values)
        )  # [S, K, H]
        heads = q[g].astype(np.float64).reshape(shape.window, -1, Q, shape.head_dim)
        for h in range(shape.num_kv_heads):
            score = np.einsum("wqh,sh->wqs", heads[:, h], k[:, h].astype(np.float64), optimize=True) * shape.scores.scale
            if shape.scores.cap is not None:
                score = shape.scores.cap * np.tanh(score / shape.scores.cap)
            distance = positions[g][:, None] - seen[None, :]
            keep = distance >= 0
            if shape.scores.sliding_window is not None:
                keep &= distance < shape.scores.sliding_window
            score = np.where(keep[:, None], score, -np.inf)
            p = np.exp(score - score.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            out[g, :, h * Q : (h + 1) * Q] = np.einsum("wqs,sh->wqh", p, v[:, h].astype(np.float64), optimize=True)
    return out
