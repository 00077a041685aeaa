"""The engine's compiled programs: prefill, segments of steps over some rows, and the replay of given texts."""

from functools import partial

import jax

from detspec.config import ModelConfig, Schedule
from detspec.engine.policy import Plan
from detspec.generate.insert import put_rows, take_rows
from detspec.generate.loop import default_draft, dvr_step, fast_step, run
from detspec.generate.prefill import prefill
from detspec.generate.score import Replayed, replay
from detspec.model.params import Params
from detspec.state import GenState


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def prefill_rows(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Catches up all live rows."""
    return prefill(params, cfg, state, schedule=schedule)


@partial(jax.jit, static_argnames=("cfg", "schedule", "plan"), donate_argnames=("state",))
def run_segment(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    rows: jax.Array,
    max_steps: jax.Array,
    min_live: jax.Array,
    *,
    schedule: Schedule,
    plan: Plan,
) -> GenState:
    """Steps `rows [plan.batch]` (all different) by `plan`, until `max_steps` or fewer than `min_live` of them are live."""
    canonical = schedule.budget(plan.rows, plan.window)
    if plan.fast:
        step_fn = partial(fast_step, params, cfg, schedule=schedule)
    else:
        step_fn = partial(dvr_step, params, cfg, draft_fn=default_draft(canonical), schedule=canonical)
    part = run(take_rows(state, rows), step_fn, max_steps=max_steps, min_live=min_live)
    return put_rows(state, rows, part)


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def replay_rows(
    params: Params, cfg: ModelConfig, state: GenState, tokens: jax.Array, length: jax.Array, *, schedule: Schedule
) -> tuple[Replayed, GenState]:
    """Reads the continuations of all live rows, prefilled: `tokens [B, max_len]` are the whole texts, `length [B]` long."""
    return replay(params, cfg, state.replace(tokens=tokens, committed=length), schedule=schedule)
