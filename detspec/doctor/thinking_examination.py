"""Examination of reading with thoughts: what must not matter to thoughts, their states, and the keys and values behind them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from detspec.checkpoint.load import Model
from detspec.doctor.examination import POISON, Axis, Check, Disturbance, SayFn, compare, different_pages, disturbed, held_by
from detspec.engine.bits import first_difference
from detspec.generation.init import init_state
from detspec.generation.insert import Entry, insert, pack_requests
from detspec.held import Jitted
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.thinking.think_prompt import think_prompt
from detspec.thinking.thoughts import thought_lists

NUM_CHUNKS = (6, 13, 4)  # that are thought about, of the prompt and of two neighbours, if the model reads so far
NUM_SEQUENCES = len(NUM_CHUNKS)
SAMPLING = SamplingParams(max_tokens=1)
DISTURBANCES = {"pages reversed": Disturbance(is_reversed=True), "poisoned": Disturbance(is_poisoned=True)}


class ReadPrompt(NamedTuple):
    """What is known of a prompt that was read."""

    held: dict[str, np.ndarray]  # by pool, `[positions, ...]` as stored
    num_positions: int
    thoughts: np.ndarray  # [chunks, M] int32
    states: np.ndarray  # [C, D], of the last thought


def examine_thoughts(model: Model, schedule: Schedule, say: SayFn = lambda step: None) -> tuple[Check, ...]:
    """Varies how `model` reads one made-up prompt in passes of `schedule`; no checks if it does not think."""
    if model.cfg.thinking is None:
        return ()
    examination = _Examination(model, schedule)
    anchor = examination.read()
    return compare(anchor, examination.axes(anchor), _difference, say)


class _Examination:
    """A prompt, its neighbours, and the ways to read them."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.model = model
        self.schedule = schedule
        cfg = model.cfg
        assert cfg.thinking is not None
        most = (cfg.max_position - 2) // cfg.thinking.chunk
        self.num_chunks, *others = (min(number, most) for number in NUM_CHUNKS)
        rng = np.random.default_rng(0)
        lengths = [number * cfg.thinking.chunk + 1 for number in (self.num_chunks, *others)]
        self.prompts = [rng.integers(0, cfg.vocab_size, length).tolist() for length in lengths]

    def axes(self, anchor: ReadPrompt) -> Iterator[Axis[ReadPrompt]]:
        """The ways to vary a reading."""
        right = thought_lists(anchor.thoughts)
        wrong = [[(thought[0] + 1) % self.model.cfg.vocab_size, *thought[1:]] for thought in right]
        partly = [wrong[i] if i % 3 == 0 else thought for i, thought in enumerate(right)]
        told = {"right": right, "every third wrong": partly, "all wrong": wrong}
        variants = [(name, partial(self.read, drafts=drafts)) for name, drafts in told.items()]
        yield "drafted thoughts", "what the drafts of the thoughts were", variants
        variants = [("sequence 1 alone", partial(self.read, sequence=1))]
        for b in range(NUM_SEQUENCES):
            variants.append((f"sequence {b} of {NUM_SEQUENCES}", partial(self.read, sequence=b, neighbours=True)))
        yield "reading places", "which sequence the prompt is, and what others read", variants
        placed = [(name, partial(self.read, disturbance=disturbance)) for name, disturbance in DISTURBANCES.items()]
        yield "reading pages", f"its pages, and unused slots filled with +-{POISON:g}", placed

    def read(
        self,
        *,
        drafts: Sequence[Sequence[int]] = (),
        sequence: int = 0,
        neighbours: bool = False,
        disturbance: Disturbance | None = None,
    ) -> ReadPrompt:
        """Reads the prompt as `sequence`, `neighbours` as the other ones, with `drafts` of its thoughts."""
        cfg = self.model.cfg
        schedule = self.schedule
        max_len = schedule.numerics.whole_pages(max(map(len, self.prompts)) + SAMPLING.max_tokens)
        state = init_state(
            cfg, max_requests=NUM_SEQUENCES, max_len=max_len, max_stop_ids=1, max_logit_bias=1, schedule=schedule
        )
        state = state.replace(cache=disturbed(state.cache, cfg, schedule, disturbance or Disturbance()))
        places = [sequence, *(other for other in range(NUM_SEQUENCES) if other != sequence)]
        entries = [Entry(place, prompt, SAMPLING) for place, prompt in zip(places, self.prompts, strict=True)]
        entries[0] = entries[0]._replace(thoughts=drafts)
        state = insert(state, pack_requests(state, entries if neighbours else entries[:1], ()))
        state = _read(self.model.params, cfg, state, schedule=schedule)
        assert state.reading is not None
        thoughts, states = (np.asarray(x[sequence]) for x in (state.reading.thoughts, state.reading.states))
        length = int(state.cache.length[sequence])
        held = held_by(state.cache, cfg, sequence, length, schedule)
        return ReadPrompt(held, length, thoughts[: self.num_chunks], states)


_read = Jitted(think_prompt, static_argnames=("cfg", "schedule"))


def _difference(anchor: ReadPrompt, other: ReadPrompt) -> str:
    """Where `other` first parts from `anchor`, in words; "" if nowhere."""
    if anchor.num_positions != other.num_positions:
        return f"{other.num_positions} positions were read, not {anchor.num_positions}"
    if differs := different_pages(anchor.held, other.held):
        return differs
    if found := first_difference([(anchor.thoughts, other.thoughts)]):
        said = [thought_lists(each.thoughts[found[0] : found[0] + 1])[0] for each in (anchor, other)]
        return f"the thought after chunk {found[0]} is {said[1]}, not {said[0]}"
    found = first_difference([(anchor.states, other.states)])
    return "" if found is None else f"the state at place {found[0]}, with all thoughts, keys and values equal"
