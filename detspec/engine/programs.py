"""The engine's compiled programs: prefill, segments of steps over some rows, and the audit of what rows hold."""

from functools import partial

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig, Schedule
from detspec.draft.none import no_draft
from detspec.draft.recorded import recorded_draft
from detspec.draft.self_draft import self_draft
from detspec.engine.policy import Plan
from detspec.generate.insert import put_rows, take_rows
from detspec.generate.loop import run
from detspec.generate.prefill import prefill
from detspec.model.params import Params
from detspec.state import GenState

FAST_WINDOW = 2  # a self draft of one token, of which ordinary rows commit all


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
    window = FAST_WINDOW if plan.fast else plan.window
    canonical = schedule.budget(max(plan.rows, window), window)
    draft_fn = no_draft if window == 1 else self_draft(window, schedule)
    part = take_rows(state, rows)
    part = run(params, cfg, part, draft_fn=draft_fn, schedule=canonical, max_steps=max_steps, min_live=min_live)
    return put_rows(state, rows, part)


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def replay_rows(
    params: Params, cfg: ModelConfig, state: GenState, tokens: jax.Array, length: jax.Array, *, schedule: Schedule
) -> GenState:
    """Generates all live rows anew with `tokens [B, max_len]` as the draft, `length [B]` of them in use."""
    state = prefill(params, cfg, state, schedule=schedule)
    draft_fn = recorded_draft(tokens, length, schedule.window)
    steps = jnp.int32(tokens.shape[1])
    return run(params, cfg, state, draft_fn=draft_fn, schedule=schedule, max_steps=steps, min_live=jnp.int32(1))
