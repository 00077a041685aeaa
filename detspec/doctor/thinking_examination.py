"""Examination of reading with thoughts: no variation may change thoughts, their states, or the keys and values behind them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from detspec.checkpoint.load import Model
from detspec.doctor.examination import POISON, Axis, Check, Disturbance, SayFn, compare, different_pages, disturbed, held_by
from detspec.engine.bits import first_difference
from detspec.generation.init import init_state
from detspec.generation.insert import insert, pack_requests
from detspec.held import Jitted
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.thinking.reading import reading_of
from detspec.thinking.think_prompt import think_prompt
from detspec.thinking.thoughts import thought_lists

NUM_CHUNKS = (6, 13, 4)  # that are thought about, of the prompt and of two neighbours, if the model reads so far
NUM_SEQUENCES = len(NUM_CHUNKS)
SAMPLING = SamplingParams(max_tokens=1)
AS_ALLOCATED = Disturbance()
POOLS = {"pages reversed": Disturbance(is_reversed=True), "poisoned": Disturbance(is_poisoned=True)}


class ReadPrompt(NamedTuple):
    """Results of reading a prompt."""

    held: dict[str, np.ndarray]  # by pool, `[positions, ...]` as stored
    num_positions: int
    thoughts: np.ndarray  # [chunks, M] int32
    states: np.ndarray  # [C, D], of the last thought


def examine_thoughts(model: Model, schedule: Schedule, say: SayFn = lambda step: None) -> tuple[Check, ...]:
    """Varies how `model` reads one made-up prompt in passes of `schedule`; no checks if it does not think."""
    if model.cfg.thinking is None:
        return ()
    read = partial(read_prompt, model, schedule)
    anchor = read()
    return compare(anchor, axes(read, anchor, model.cfg.vocab_size), _difference, say)


def axes(read: Callable[..., ReadPrompt], anchor: ReadPrompt, vocab_size: int) -> Iterator[Axis[ReadPrompt]]:
    """Yields the ways to vary a reading."""
    right = thought_lists(anchor.thoughts)
    wrong = [[(thought[0] + 1) % vocab_size, *thought[1:]] for thought in right]
    partly = [wrong[i] if i % 3 == 0 else thought for i, thought in enumerate(right)]
    drafted = {"right": right, "every third wrong": partly, "all wrong": wrong}
    variants = [(name, partial(read, drafts=drafts)) for name, drafts in drafted.items()]
    yield "drafted thoughts", "what the drafts of the thoughts were", variants
    variants = [("sequence 1 alone", partial(read, sequence=1))]
    variants += [(f"sequence {b} of {NUM_SEQUENCES}", partial(read, sequence=b, neighbours=True)) for b in range(NUM_SEQUENCES)]
    yield "reading places", "which sequence the prompt is, and what others read", variants
    variants = [(name, partial(read, pools=pools)) for name, pools in POOLS.items()]
    yield "reading pages", f"its pages, and unused slots filled with +-{POISON:g}", variants


def read_prompt(
    model: Model,
    schedule: Schedule,
    *,
    drafts: Sequence[Sequence[int]] = (),
    sequence: int = 0,
    neighbours: bool = False,
    pools: Disturbance = AS_ALLOCATED,
) -> ReadPrompt:
    """Reads a made-up prompt as `sequence`, `neighbours` as the other ones, with `drafts` of its thoughts."""
    cfg = model.cfg
    assert cfg.thinking is not None
    most = (cfg.max_position - 2) // cfg.thinking.chunk
    num_chunks = [min(number, most) for number in NUM_CHUNKS]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.vocab_size, number * cfg.thinking.chunk + 1).tolist() for number in num_chunks]
    max_len = schedule.numerics.whole_pages(max(map(len, prompts)) + SAMPLING.max_tokens)
    state = init_state(cfg, max_requests=NUM_SEQUENCES, max_len=max_len, max_stop_ids=1, max_logit_bias=1, schedule=schedule)
    state = state.replace(cache=disturbed(state.cache, model.cfg, schedule, pools))
    places = [sequence, *(other for other in range(NUM_SEQUENCES) if other != sequence)]
    entries = [Entry(place, prompt, SAMPLING) for place, prompt in zip(places, prompts, strict=True)]
    entries[0] = entries[0]._replace(brings={"thoughts": drafts})
    state = insert(state, pack_requests(state, entries if neighbours else entries[:1], ()))
    state = _read(model.params, cfg, state, schedule=schedule)
    reading = reading_of(state)
    thoughts, states = (np.asarray(x[sequence]) for x in (reading.thoughts, reading.states))
    length = int(state.cache.length[sequence])
    held = held_by(state.cache, model.cfg, sequence, length, schedule)
    return ReadPrompt(held, length, thoughts[: num_chunks[0]], states)


_read = Jitted(think_prompt, static_argnames=("cfg", "schedule"))


def _difference(anchor: ReadPrompt, other: ReadPrompt) -> str:
    """Says where `other` first parts from `anchor`; "" if nowhere."""
    if anchor.num_positions != other.num_positions:
        return f"{other.num_positions} positions were read, not {anchor.num_positions}"
    if differs := different_pages(anchor.held, other.held):
        return differs
    if found := first_difference([(anchor.thoughts, other.thoughts)]):
        said = [thought_lists(each.thoughts[found[0] : found[0] + 1])[0] for each in (anchor, other)]
        return f"the thought after chunk {found[0]} is {said[1]}, not {said[0]}"
    found = first_difference([(anchor.states, other.states)])
    return "" if found is None else f"the state at place {found[0]}, with all thoughts, keys and values equal"
