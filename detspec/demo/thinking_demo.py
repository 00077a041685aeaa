"""A model that thinks while it reads, answering one question: alone, and among others with other drafts."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from detspec.checkpoint.load import Model
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.generation.init import start_state
from detspec.generation.loop import generate_state
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.thinking.blocks import thinking_of
from detspec.thinking.reading import reading_of
from detspec.thinking.rider import drafted_by
from detspec.thinking.thoughts import thought_lists

QUESTION = "A coin's state is heads. Alice flips, then Bob flips. What's the state?"
ANSWER_SIGN = "A:"
OTHERS = (
    "A coin's state is tails. Carol waits, then David flips, then Erin sings, then Frank flips. What's the state? A:",
    "A coin's state is heads. Bob reads, then Bob flips. What's the state? A:",
    "A coin's state is tails. Alice flips. What's the state? A:",
)
MAX_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class ThinkingReport:
    """The thoughts and the answer."""

    chunks: tuple[str, ...]  # texts of the prompt's chunks
    thoughts: tuple[str, ...]  # thought after each chunk except the last; "" for a trivial one
    answer: str  # the new text
    rounds: int  # rounds of speculation, with nothing but trivial drafts
    equal: bool  # the same bits of thoughts, states, tokens and log-probabilities came out among others and with other drafts
    num_others: int  # other requests, whose thoughts a cheap pass that reads ahead drafted
    first_s: float  # seconds with compilation
    again_s: float  # and without

    def table(self) -> str:
        """The report as text."""
        width = max(len(chunk) for chunk in self.chunks)
        lines = [f"{'chunk':{width}}   thought"]
        for chunk, thought in zip(self.chunks, (*self.thoughts, None), strict=True):
            lines.append(f"{chunk:{width}}   {'' if thought is None else thought or '-'}".rstrip())
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)} of speculation"
        speed = f"{rounds}, {self.again_s * 1e3:.1f} ms ({self.first_s:.1f} s with compilation)"
        same = "the same bits" if self.equal else "OTHER BITS"
        among = f"Among {self.num_others} other requests and with other drafts: {same} of thoughts, answer, log-probabilities."
        return "\n".join([*lines, "", f"answer: {self.answer}", "", speed, among])


def run_thinking_demo(model: Model, question: str = QUESTION) -> ThinkingReport:
    """Answers `question`; appends "A:" to it if needed.

    Raises `InputError` if the model does not think or has no tokenizer, or the question has unknown words or is too long.
    """
    thinking = thinking_of(model.cfg)
    if model.tokenizer is None:
        raise InputError(f"{model.no_tokenizer}, so it cannot read a question")
    if not question.rstrip().endswith(ANSWER_SIGN):
        question = f"{question.rstrip()} {ANSWER_SIGN}"
    prompt = model.tokenizer.encode(question)
    if len(prompt) + MAX_TOKENS > model.cfg.max_position:
        raise InputError(
            f"the question has {len(prompt)} tokens; with {MAX_TOKENS} for the answer that is more than the model's "
            f"{model.cfg.max_position} positions: ask a shorter one"
        )
    schedule = chosen_schedule(None, model.cfg)
    schedule = schedule.with_budget(schedule.budget.rows, 1)  # a short answer needs no drafts
    others = other_prompts(model, prompt)
    began = time.perf_counter()
    alone = _answer(model, [prompt], schedule, "none")
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    alone = _answer(model, [prompt], schedule, "none")
    again_s = time.perf_counter() - began
    among = _answer(model, [*others, prompt], schedule, "self")
    thoughts, bits = _read_off(alone, 0)
    C = thinking.chunk
    new = np.asarray(alone.tokens)[0, len(prompt) : int(alone.committed[0])].tolist()
    return ThinkingReport(
        chunks=tuple(model.decode(prompt[start : start + C]) for start in range(0, len(prompt), C)),
        thoughts=tuple(model.decode([token for token in thought if token != thinking.end_id]) for thought in thoughts),
        answer=model.decode(new),
        rounds=int(alone.counters.num_rejected_thoughts[0]) + 1,
        equal=bits == _read_off(among, len(others))[1],
        num_others=len(others),
        first_s=first_s,
        again_s=again_s,
    )


def other_prompts(model: Model, prompt: Sequence[int]) -> list[list[int]]:
    """Prompts for the same batch as `prompt`: `OTHERS`, or suffixes of `prompt` if the tokenizer lacks one of their words."""
    assert model.tokenizer is not None
    try:
        return [model.tokenizer.encode(other) for other in OTHERS]
    except InputError:
        return [list(prompt[-length:]) for length in range(1, len(OTHERS) + 1)]


def _answer(model: Model, prompts: Sequence[Sequence[int]], schedule: Schedule, think: str) -> GenState:
    """The final state of all `prompts` side by side."""
    longest = max(map(len, prompts)) + MAX_TOKENS
    max_len = min(schedule.numerics.whole_pages(longest), model.cfg.max_position)
    sampling = [SamplingParams(max_tokens=MAX_TOKENS, thinking=True)] * len(prompts)
    state = start_state(model.cfg, prompts, sampling, eos_ids=model.eos_ids, max_len=max_len, schedule=schedule)
    state = generate_state(model.params, model.cfg, drafted_by(state, think), schedule=schedule)
    return jax.block_until_ready(state)


def _read_off(state: GenState, sequence: int) -> tuple[list[list[int]], list[bytes]]:
    """The thoughts of a sequence as token ids, and all bits of its thoughts and its answer."""
    reading = reading_of(state)
    thoughts = np.asarray(reading.thoughts[sequence, : int(reading.end[sequence])])
    said = slice(int(state.committed[sequence]))
    parts = thoughts, reading.states[sequence], state.tokens[sequence, said], state.logprobs[sequence, said]
    return thought_lists(thoughts), [np.asarray(part).tobytes() for part in parts]
