"""The engine's compiled programs: reading (prefill and replays of given texts), segments of steps, and copies of pages.

The host owns the page table and knows which places are in use; every program is given both.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import Pool, map_pools
from detspec.config import ModelConfig
from detspec.draft.source import Drafter, DraftParams, DraftSource, draft_fn
from detspec.generation.insert import Array, Requests, put_requests, put_sequences, take_sequences
from detspec.generation.loop import Limits, dvr_step, ordinary_step, run
from detspec.generation.prefill import prefill, prefill_and_answer, read_by_riders
from detspec.generation.score import Asked, Replayed, read
from detspec.held import Jitted
from detspec.model.params import Params
from detspec.ops.implementations import operations
from detspec.passes import limited, missing, spans
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import GenState
from detspec.struct import Struct


class Placement(NamedTuple):
    """Places of sequences, as the host knows them."""

    page_table: Array  # [B, max_pages] int32
    in_use: Array  # [B] bool, places that hold a request
    chosen: Array  # [b] int32, places to step, all different, those in use first

    @property
    def of_all(self) -> "Placement":
        """This placement with all places chosen, these first: programs about all are the same for any number of them."""
        others = np.ones(len(self.in_use), bool)
        others[self.chosen] = False
        return self._replace(chosen=np.concatenate([self.chosen, np.flatnonzero(others)], dtype=np.int32))


class StepParams(NamedTuple):
    """The parameters of a step: the model's, and those of its draft source."""

    params: Params
    draft: DraftParams


class Texts(NamedTuple):
    """Whole texts to replay, one for each place in use."""

    tokens: Array  # [B, max_len] int32
    length: Array  # [B] int32, tokens in use
    start: Array  # [B] int32, first position to feed; what the cache holds before it stays
    wanted_from: Array  # [B] int32, first position that is asked about


class PrefillWork(NamedTuple):
    """Work of `prefill_sequences`."""

    requests: Requests
    placement: Placement  # of all places
    max_passes: Array | np.int32
    answers: Array | np.bool_  # whether the token after each prompt is committed, where passes can say it


class ReadWork(NamedTuple):
    """Work of `read_sequences`."""

    requests: Requests
    placement: Placement  # of all places
    max_passes: Array | np.int32
    texts: Texts  # length 0 if there is nothing to replay


class Decoding(NamedTuple):
    """Work of the steps of a segment."""

    schedule: Schedule  # schedule of the canonical pass
    source: DraftSource | None  # the draft source; None is ordinary decoding, and nothing is verified
    num_tokens: int  # most drafted tokens of a sequence
    narrow: Budget | None  # budget of the pass that reads no drafts, if there is such a pass
    processing: bool  # False if no sequence asks for more than a temperature


class SequenceProgress(NamedTuple):
    """Lengths and counts of sequences, in numpy."""

    steps: np.ndarray  # [b] int32, steps of the segment
    committed: np.ndarray  # [b] int32
    length: np.ndarray  # [b] int32, valid cache slots
    finish: np.ndarray  # [b] int32
    counts: np.ndarray  # [b, 9] int32, see `Counters`


class Report(Struct):
    """Facts that the host reads after a segment, about its `b` sequences; copies, so that the state can go on."""

    packed: jax.Array  # [b, 13] int32, fields of SequenceProgress
    told: jax.Array | None  # [b, ...], what the rider that reads prompts reports, if there is one
    tokens: jax.Array  # [b, max_len] int32
    logprobs: jax.Array  # [b, max_len] float32

    @property
    def is_ready(self) -> bool:
        """Whether the segment has ended."""
        return bool(self.packed.is_ready())  # type: ignore[attr-defined]  # missing in jax's stub

    @property
    def progress(self) -> SequenceProgress:
        """Lengths and counts of the sequences; waits for the segment."""
        packed = np.asarray(self.packed)
        steps, committed, length, finish = packed[:, :4].T
        return SequenceProgress(steps, committed, length, finish, packed[:, 4:])


@partial(Jitted, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def prefill_sequences(
    params: Params, cfg: ModelConfig, state: GenState, work: PrefillWork, *, schedule: Schedule
) -> tuple[GenState, Report]:
    """Puts requests into their places and catches up all places in use, as far as a number of passes does.

    Prompts that a rider reads come first, in as many passes at most. The report has all places, as `placement.chosen` has them.
    No logits are processed for the tokens that it commits where it `answers`.
    """
    max_passes = jnp.asarray(work.max_passes)
    state = _with_requests(params, cfg, state, work, max_passes, schedule=schedule)
    if operations(schedule.numerics).leaves_out_rows:  # else the last layer and the head would be worked out for all rows
        answers = jnp.asarray(work.answers)
        plain = state.with_processing(False)
        plain = prefill_and_answer(params, cfg, plain, schedule=schedule, max_passes=max_passes, answers=answers)
        state = plain.with_processing(True)
    else:
        state = prefill(params, cfg, state, schedule=schedule, max_passes=max_passes)
    chosen = jnp.asarray(work.placement.chosen)
    return state, jax.tree.map(lambda x: x[chosen], _report(state, jnp.int32(0)))


@partial(Jitted, static_argnames=("cfg", "schedule", "asked"), donate_argnames=("state",))
def read_sequences(
    params: Params, cfg: ModelConfig, state: GenState, work: ReadWork, *, schedule: Schedule, asked: Asked
) -> tuple[GenState, Replayed]:
    """Does as `prefill_sequences` without answers; or replays given texts. One of both is not used.

    The last token of a text is read only where targets are asked for, since it says nothing about the text.

    A replay reads the texts of all places in use, and says what was `asked`; sequences keep their own tokens and lengths.
    """
    texts = jax.tree.map(jnp.asarray, work.texts)
    is_replay = jnp.any(texts.length > 0)
    max_passes = jnp.where(is_replay, 0, jnp.asarray(work.max_passes))  # passes that catch up
    after = _with_requests(params, cfg, state, work, max_passes, schedule=schedule)
    lacking = limited(missing(after, schedule), max_passes, schedule)
    end = texts.length if asked.choose else jnp.maximum(texts.length - 1, 0)
    text = spans(texts.start, jnp.where(jnp.asarray(work.placement.in_use), end, 0), schedule)
    nothing = jnp.full_like(texts.length, texts.tokens.shape[1] + 1)  # no position is
    given, tokens, committed, wanted_from = jax.tree.map(
        lambda of_text, own: jnp.where(is_replay, of_text, own),
        (text, texts.tokens, texts.length, texts.wanted_from),
        (lacking, after.tokens, after.committed, nothing),
    )
    passed = after.replace(tokens=tokens, committed=committed)
    replayed, cache = read(params, cfg, passed, given, schedule=schedule, asked=asked, wanted_from=wanted_from)
    cache = cache.replace(length=jnp.maximum(after.cache.length, lacking.end))
    return after.replace(cache=cache, live=jnp.where(is_replay, state.live, after.live)), replayed


def _canonical(named: Mapping[str, Any]) -> Numerics | None:
    """The numerics of the canonical passes of a segment; None of ordinary decoding."""
    decoding: Decoding = named["decoding"]
    return None if decoding.source is None else decoding.schedule.numerics


@partial(Jitted, numerics_of=_canonical, static_argnames=("cfg", "decoding"), donate_argnames=("state",))
def run_segment(
    weights: StepParams,
    cfg: ModelConfig,
    state: GenState,
    placement: Placement,
    limits: Limits,
    wide_cost: Array | np.float32,
    *,
    decoding: Decoding,
) -> tuple[GenState, Report]:
    """Steps the sequences `placement.chosen` until one of `limits` is reached; the report has them in this order.

    `wide_cost` is how long a pass takes that reads drafts, in passes that read none, see `verify`.

    Idle steps are those of chosen sequences in use that are no longer live.
    """
    schedule = decoding.schedule
    source = decoding.source
    state = state.with_processing(decoding.processing)
    step_fn: Callable[[GenState], GenState]
    if source is None:
        step_fn = partial(ordinary_step, weights.params, cfg, schedule=schedule)
    else:
        draft = draft_fn(Drafter(source, weights.draft), schedule, decoding.num_tokens)
        verified_step = partial(
            dvr_step,
            weights.params,
            cfg,
            draft_fn=draft,
            schedule=schedule,
            narrow=decoding.narrow,
            wide_cost=jnp.asarray(wide_cost),
        )

        def step_fn(state: GenState) -> GenState:
            return verified_step(state)[0]

    arranged = _arranged(state, placement)
    chosen = jnp.asarray(placement.chosen)
    takes_all = chosen.shape[0] == state.live.shape[0]  # then nothing is copied out of the state and back
    part = arranged if takes_all else take_sequences(arranged, chosen)
    num_sequences = jnp.asarray(placement.in_use)[chosen].sum(dtype=jnp.int32)
    part, steps = run(part, step_fn, limits=limits, num_sequences=num_sequences)
    report = _report(part, steps)
    if not takes_all:
        return put_sequences(state, chosen, part).with_processing(True), report
    return part.with_processing(True), jax.tree.map(lambda x: x[chosen], report)


@partial(jax.jit, static_argnames=("cfg", "numerics"), donate_argnames=("state",))
def copy_pages(state: GenState, cfg: ModelConfig, source: jax.Array, target: jax.Array, *, numerics: Numerics) -> GenState:
    """Copies pages `source [n]` over pages `target [n]`, in all layers; scratch over scratch where there is nothing to copy."""
    copy = operations(numerics).copy_pages

    def copied(declared: Pool, array: jax.Array) -> jax.Array:
        return array if declared.by_seat else copy(array, source, target)

    return state.replace(cache=state.cache.replace(pools=map_pools(copied, cfg, numerics, state.cache.pools)))


def _with_requests(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    work: PrefillWork | ReadWork,
    max_passes: jax.Array,
    *,
    schedule: Schedule,
) -> GenState:
    """`state` with the requests of `work` in their places, and what a rider reads of their prompts."""
    state = _arranged(put_requests(state, work.requests), work.placement)
    new = jnp.asarray(work.requests.chosen)
    return read_by_riders(params, cfg, state, schedule=schedule, new=new, max_passes=max_passes)


def _report(state: GenState, steps: jax.Array) -> Report:
    """Facts about the sequences of `state` after `steps`."""
    progress = [jnp.full_like(state.committed, steps), state.committed, state.cache.length, state.finish]
    packed = jnp.concatenate([jnp.stack(progress, axis=1), state.counters.counts], axis=1)
    return Report(packed, state.riders.told, state.tokens, state.logprobs)


def _arranged(state: GenState, placement: Placement) -> GenState:
    """`state` with the host's page table, and nothing live in places that the host has taken back."""
    cache = state.cache.replace(page_table=jnp.asarray(placement.page_table))
    return state.replace(live=state.live & jnp.asarray(placement.in_use), cache=cache)
