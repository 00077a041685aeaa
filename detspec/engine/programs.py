"""The engine's compiled programs: prefill, segments of steps over some rows, copies of pages, and the replay of given texts.

The host owns the page table and knows which rows are in use; every program is given both.
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.engine.policy import Plan
from detspec.generate.insert import Requests, put_requests, put_rows, take_rows
from detspec.generate.loop import default_draft, dvr_step, fast_step, run
from detspec.generate.prefill import prefill
from detspec.generate.score import Replayed, replay
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import READING_COUNTERS, GenState
from detspec.thinking.drafts import guess_fn
from detspec.thinking.think_prompt import read
from detspec.thinking.thoughts import is_trivial


class Report(flax.struct.PyTreeNode):
    """What the host reads after a segment, of the `b` rows that it stepped; copies, so that the state can go on."""

    progress: jax.Array  # [4 + counters, b] int32: steps of the segment, committed, cache length, finish, counters
    thoughts: jax.Array | None  # [b, X, M] int32, of models that think
    tokens: jax.Array  # [b, max_len] int32
    logprobs: jax.Array  # [b, max_len] float32


@partial(jax.jit, static_argnames=("cfg", "schedule", "guesses"), donate_argnames=("state",))
def prefill_rows(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    requests: Requests,
    in_use: jax.Array,
    page_table: jax.Array,
    max_passes: jax.Array,
    *,
    schedule: Schedule,
    guesses: str,
) -> GenState:
    """Puts `requests` into their rows, and catches up the rows `in_use [B]` bool as far as `max_passes` passes reach.

    Prompts that are to be thought about are read first, in as many passes at most; `guesses` names who guesses the thoughts
    of new requests that bring none, as those that come back do.
    """
    state = _arranged(put_requests(state, requests), in_use, page_table)
    if state.reading is not None:
        state = _guessed(params, cfg, state, jnp.asarray(requests.chosen), schedule=schedule, guesses=guesses)
        state = read(params, cfg, state, schedule=schedule, max_passes=max_passes)
    return prefill(params, cfg, state, schedule=schedule, max_passes=max_passes)


@partial(jax.jit, static_argnames=("cfg", "schedule", "plan"), donate_argnames=("state",))
def run_segment(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    in_use: jax.Array,
    page_table: jax.Array,
    rows: jax.Array,
    max_steps: jax.Array,
    min_live: jax.Array,
    max_idle: jax.Array,
    *,
    schedule: Schedule,
    plan: Plan,
) -> tuple[GenState, Report]:
    """Steps `rows [plan.batch]` (all different) by `plan`; what is reported comes in their order.

    Ends after `max_steps`, when fewer than `min_live` of the rows are live, or when those in use that are not live have
    idled for `max_idle` steps, added up.
    """
    canonical = schedule.with_budget(plan.rows, plan.window)
    if plan.fast:
        step_fn = partial(fast_step, params, cfg, schedule=schedule)
    else:
        step_fn = partial(dvr_step, params, cfg, draft_fn=default_draft(canonical), schedule=canonical)
    arranged = _arranged(state, in_use, page_table)
    takes_all = plan.batch == state.live.shape[0]  # then nothing is copied out of the state and back
    part = arranged if takes_all else take_rows(arranged, rows)
    num_rows = in_use[rows].sum(dtype=jnp.int32)
    part, steps = run(part, step_fn, max_steps=max_steps, min_live=min_live, num_rows=num_rows, max_idle=max_idle)
    steps = jnp.full_like(part.committed, steps)
    progress = [steps, part.committed, part.cache.length, part.finish, *jax.tree.leaves(part.counters)]
    thoughts = None
    if part.reading is not None:
        progress += [getattr(part.reading, name) for name in READING_COUNTERS]
        thoughts = part.reading.thoughts
    report = Report(jnp.stack(progress), thoughts, part.tokens, part.logprobs)
    if not takes_all:
        return put_rows(state, rows, part), report
    of_rows = jax.tree.map(lambda x: x[rows], (report.thoughts, report.tokens, report.logprobs))
    return part, Report(report.progress[:, rows], *of_rows)


@partial(jax.jit, donate_argnames=("state",))
def copy_pages(state: GenState, source: jax.Array, target: jax.Array) -> GenState:
    """Copies pages `source [n]` over pages `target [n]`, in all layers; scratch over scratch where there is nothing to copy."""
    cache = state.cache
    k, v = (tuple(pages.at[target].set(pages[source]) for pages in pools) for pools in (cache.k, cache.v))
    return state.replace(cache=cache.replace(k=k, v=v))


@partial(jax.jit, static_argnames=("cfg", "schedule", "top_k"), donate_argnames=("state",))
def replay_rows(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    tokens: jax.Array,
    length: jax.Array,
    *,
    schedule: Schedule,
    top_k: int = 0,
) -> tuple[Replayed, GenState]:
    """Reads all live rows from where they are in the cache: `tokens [B, max_len]` are the whole texts, `length [B]` long."""
    return replay(params, cfg, state.replace(tokens=tokens, committed=length), schedule=schedule, top_k=top_k)


@partial(jax.jit, static_argnames=("cfg", "schedule", "top_k"), donate_argnames=("state",))
def score_rows(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    chosen: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    *,
    schedule: Schedule,
    top_k: int,
) -> tuple[Replayed, GenState]:
    """Reads what rows `chosen [B]` bool have committed once more, from `start [B]` on, for the likeliest tokens everywhere."""
    state = state.replace(cache=state.cache.replace(page_table=page_table))
    replayed, after = replay(params, cfg, state.replace(live=chosen), schedule=schedule, choose=False, top_k=top_k, start=start)
    return replayed, state.replace(cache=after.cache.replace(length=state.cache.length))


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def read_rows(params: Params, cfg: ModelConfig, state: GenState, requests: Requests, *, schedule: Schedule) -> GenState:
    """Puts `requests` into their rows, and reads the prompts that are to be thought about, up to their last chunks."""
    return read(params, cfg, put_requests(state, requests), schedule=schedule)


def _guessed(
    params: Params, cfg: ModelConfig, state: GenState, new: jax.Array, *, schedule: Schedule, guesses: str
) -> GenState:
    """`state` with thoughts guessed for rows `new [B]` that bring no guesses."""
    if guesses == "trivial" or state.reading is None:
        return state
    brings_none = is_trivial(state.reading.thoughts, state.reading.end_id).all(1)
    guessed = guess_fn(guesses, schedule)(params, cfg, state.replace(live=state.live & new & brings_none))
    return guessed.replace(live=state.live)


def _arranged(state: GenState, in_use: jax.Array, page_table: jax.Array) -> GenState:
    """`state` with the host's page table, and no row live that the host has taken out."""
    return state.replace(live=state.live & in_use, cache=state.cache.replace(page_table=page_table))
