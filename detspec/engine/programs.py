"""The engine's compiled programs: prefill, segments of steps over some sequences, copies of pages, and replays of given texts.

The host owns the page table and knows which places are in use; every program is given both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.draft.source import Drafter, DraftParams, DraftSource, draft_fn
from detspec.generation.insert import Requests, put_requests
from detspec.generation.loop import Limits, dvr_step, ordinary_step, run
from detspec.generation.prefill import prefill
from detspec.generation.score import Replayed, replay
from detspec.generation.sequences import put_sequences, take_sequences
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import Counters, GenState
from detspec.thinking.think_prompt import think_prompt
from detspec.thinking.thoughts import is_trivial

Array = jax.Array | np.ndarray


class Placement(NamedTuple):
    """Where sequences are, as the host knows it."""

    page_table: Array  # [B, max_pages] int32
    in_use: Array  # [B] bool, places that hold a request
    chosen: Array  # [b] int32, places to step, all different, those in use first; none for programs about all places

    @property
    def of_all(self) -> "Placement":
        """The same with no places chosen: programs about all places are the same program for any number of chosen ones."""
        return self._replace(chosen=np.zeros(0, np.int32))


class Weights(NamedTuple):
    """The parameters of a step: the model's, and those of its draft source."""

    params: Params
    draft: DraftParams


class Texts(NamedTuple):
    """Whole texts to replay, one for each place."""

    tokens: Array  # [B, max_len] int32
    length: Array  # [B] int32, tokens in use
    start: Array  # [B] int32, first position to feed; what the cache holds before it stays


class Asked(NamedTuple):
    """What a replay is to find out."""

    choose: bool  # the token that each sequence's sampling parameters choose, at every position
    top_k: int  # how many of the likeliest tokens, at every position


class Progress(NamedTuple):
    """How far sequences are."""

    steps: Any  # [b] int32, steps of the segment
    committed: Any  # [b] int32
    length: Any  # [b] int32, valid cache slots
    finish: Any  # [b] int32
    counters: Counters  # [b] int32 each


class Report(flax.struct.PyTreeNode):
    """What the host reads after a segment about the `b` sequences that it stepped; copies, so that the state can go on."""

    packed: jax.Array  # [fields of Progress, b] int32
    thoughts: jax.Array | None  # [b, X, M] int32, of models that think
    tokens: jax.Array  # [b, max_len] int32
    logprobs: jax.Array  # [b, max_len] float32

    @property
    def is_ready(self) -> bool:
        """Whether the segment has ended."""
        return bool(self.packed.is_ready())  # type: ignore[attr-defined]  # missing in jax's stub

    @property
    def progress(self) -> Progress:
        """How far the sequences are, in numpy; waits for the segment."""
        steps, committed, length, finish, *counters = np.asarray(self.packed)
        return Progress(steps, committed, length, finish, Counters(*counters))


@partial(jax.jit, static_argnames=("cfg", "schedule", "think"), donate_argnames=("state",))
def prefill_sequences(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    work: tuple[Requests, Placement, Array],
    *,
    schedule: Schedule,
    think: DraftSource,
) -> GenState:
    """Puts requests into their places, and catches up all places in use as far as a number of passes reaches.

    `work` is the requests, the placement and the number of passes. Prompts that are to be thought about come first, in as many
    passes at most. `think` drafts the thoughts of new requests that bring none.
    """
    requests, placement, max_passes = work
    state = _arranged(put_requests(state, requests), placement)
    if state.reading is not None:
        state = _with_thoughts(params, cfg, state, requests, schedule=schedule, think=think)
        state = think_prompt(params, cfg, state, schedule=schedule, max_passes=jnp.asarray(max_passes))
    return prefill(params, cfg, state, schedule=schedule, max_passes=jnp.asarray(max_passes))


@partial(jax.jit, static_argnames=("cfg", "schedule", "source"), donate_argnames=("state",))
def run_segment(
    weights: Weights,
    cfg: ModelConfig,
    state: GenState,
    placement: Placement,
    limits: Limits,
    *,
    schedule: Schedule,
    source: DraftSource | None,
) -> tuple[GenState, Report]:
    """Steps the sequences `placement.chosen` until one of `limits` is reached; the report has them in this order.

    Idle steps are those of chosen sequences in use that are no longer live. Without a `source` of drafts decoding is ordinary,
    and nothing is verified.
    """
    step_fn: Callable[[GenState], GenState]
    if source is None:
        step_fn = partial(ordinary_step, weights.params, cfg, schedule=schedule)
    else:
        draft = draft_fn(Drafter(source, weights.draft), schedule)

        def step_fn(state: GenState) -> GenState:
            return dvr_step(weights.params, cfg, state, draft_fn=draft, schedule=schedule)[0]

    arranged = _arranged(state, placement)
    chosen = jnp.asarray(placement.chosen)
    takes_all = chosen.shape[0] == state.live.shape[0]  # then nothing is copied out of the state and back
    part = arranged if takes_all else take_sequences(arranged, chosen)
    num_sequences = jnp.asarray(placement.in_use)[chosen].sum(dtype=jnp.int32)
    part, steps = run(part, step_fn, limits=limits, num_sequences=num_sequences)
    progress = Progress(jnp.full_like(part.committed, steps), part.committed, part.cache.length, part.finish, part.counters)
    thoughts = None if part.reading is None else part.reading.thoughts
    report = Report(jnp.stack(jax.tree.leaves(progress)), thoughts, part.tokens, part.logprobs)
    if not takes_all:
        return put_sequences(state, chosen, part), report
    thoughts, tokens, logprobs = jax.tree.map(lambda x: x[chosen], (report.thoughts, report.tokens, report.logprobs))
    return part, Report(report.packed[:, chosen], thoughts, tokens, logprobs)


@partial(jax.jit, donate_argnames=("state",))
def copy_pages(state: GenState, source: jax.Array, target: jax.Array) -> GenState:
    """Copies pages `source [n]` over pages `target [n]`, in all layers; scratch over scratch where there is nothing to copy."""

    def copied(pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(pages.at[target].set(pages[source]) for pages in pools)

    return state.replace(cache=state.cache.replace(k=copied(state.cache.k), v=copied(state.cache.v)))


@partial(jax.jit, static_argnames=("cfg", "schedule", "asked"), donate_argnames=("state",))
def replay_texts(
    params: Params, cfg: ModelConfig, state: GenState, placement: Placement, texts: Texts, *, schedule: Schedule, asked: Asked
) -> tuple[Replayed, GenState]:
    """Replays the texts of the places in use through canonical passes; the state keeps its own texts and lengths."""
    cache = state.cache.replace(page_table=jnp.asarray(placement.page_table))
    given: dict[str, Any] = {"tokens": jnp.asarray(texts.tokens), "committed": jnp.asarray(texts.length)}
    live = jnp.asarray(placement.in_use)
    replayed, after = replay(
        params,
        cfg,
        state.replace(cache=cache, live=live, **given),
        schedule=schedule,
        choose=asked.choose,
        top_k=asked.top_k,
        start=jnp.asarray(texts.start),
    )
    return replayed, state.replace(cache=after.cache.replace(length=state.cache.length))


def _with_thoughts(
    params: Params, cfg: ModelConfig, state: GenState, requests: Requests, *, schedule: Schedule, think: DraftSource
) -> GenState:
    """`state` with thoughts drafted for new requests that bring none; those that come back bring their own."""
    assert state.reading is not None
    if think.think is None or think.name == "none":
        return state  # `put_requests` left drafts of trivial thoughts
    brings_none = is_trivial(state.reading.thoughts, state.reading.end_id).all(1)
    new = state.live & jnp.asarray(requests.chosen) & brings_none
    return think.think(params, cfg, state.replace(live=new), schedule).replace(live=state.live)


def _arranged(state: GenState, placement: Placement) -> GenState:
    """`state` with the host's page table, and nothing live in places that the host has taken back."""
    cache = state.cache.replace(page_table=jnp.asarray(placement.page_table))
    return state.replace(live=state.live & jnp.asarray(placement.in_use), cache=cache)
