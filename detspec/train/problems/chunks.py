"""Problems as token ids, their steps aligned to chunks of the prompt, and batches of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.state import NO_TOKEN, PAD_ID
from detspec.train.problems.problem import Problem, texts
from detspec.train.problems.words import END_ID, FILLER_ID, encode_texts


class Encoded(NamedTuple):
    """A problem in one arm, as token ids. `marks` and `steps` are empty except in the arm "thinking"."""

    question: str  # text of the question, for error messages
    prompt: list[int]
    marks: list[int]  # for each step the index in `prompt` of the token after which the step can be inferred
    steps: list[list[int]]
    continuation: list[int]  # ends in the end token


class Batch(NamedTuple):
    """The input of one training step; `X = T // C` in the arm "thinking", else 0."""

    tokens: np.ndarray  # [B, T + 1] int32, PAD_ID after a problem's end
    weights: np.ndarray  # [B, T] float32, 1 where the target in tokens[:, 1:] belongs to the continuation or ends it
    thoughts: np.ndarray  # [B, X, M] int32, the thought after each chunk; NO_TOKEN after a thought and where there is none


def encode(problems: Sequence[Problem], tokenizer: tokenizers.Tokenizer, arm: str, *, end_id: int = END_ID) -> list[Encoded]:
    """Token ids of `problems` in `arm`; `InputError` if the tokenizer does not know a word.

    Prompts begin with the special tokens that the tokenizer adds to every text; thoughts and continuations do not.
    """
    pairs = [texts(problem, arm) for problem in problems]
    prompts = encode_texts(tokenizer, [prompt for prompt, _ in pairs], add_special_tokens=True)
    continuations = encode_texts(tokenizer, [continuation for _, continuation in pairs])
    distinct = list(dict.fromkeys(f" {step}" for problem in problems for step in problem.steps)) if arm == "thinking" else []
    step_ids = {text: encoding.ids for text, encoding in zip(distinct, encode_texts(tokenizer, distinct), strict=True)}
    encoded = []
    for problem, prompt, continuation in zip(problems, prompts, continuations, strict=True):
        marks = token_marks(prompt.offsets, problem.marks) if arm == "thinking" else []
        steps = [step_ids[f" {step}"] for step in problem.steps] if arm == "thinking" else []
        encoded.append(Encoded(problem.question, prompt.ids, marks, steps, [*continuation.ids, end_id]))
    return encoded


def token_marks(offsets: Sequence[tuple[int, int]], marks: Sequence[int]) -> list[int]:
    """For each mark, the index of the last token that begins before it; this token holds character `mark - 1`.

    text "Ann sits."   offsets (0, 3) (4, 8) (8, 9)   marks 3, 8, 9  ->  0, 1, 2
    """
    starts = np.array([start for start, _ in offsets])
    return (np.searchsorted(starts, np.array(marks)) - 1).tolist()


def align(encoded: Encoded, thinking: ThinkingConfig, phase: int = 0) -> list[list[int]]:
    """The thought after each chunk that ends before the last prompt token, with `phase` fillers in front of the prompt.

    A thought is the steps whose mark lies in its chunk, then the end token. Steps of the last chunk have no thought.

    C = 4, phase 0   A coin's    state is heads.   Bob flips, then   Amy waits. What   's the state   ? A :
    thoughts         e           e                 tails e           tails e           e              none

    Raises `InputError` if a thought has more than `M` tokens, or a step holds the token that ends thoughts.
    """
    C = thinking.chunk
    M = thinking.max_thought
    thoughts: list[list[int]] = [[] for _ in range((phase + len(encoded.prompt) - 1) // C)]
    for mark, step in zip(encoded.marks, encoded.steps, strict=True):
        chunk = (phase + mark) // C
        if thinking.end_id in step:
            raise InputError(
                f"problem {encoded.question!r}: a step holds token {thinking.end_id}, which ends thoughts; choose another "
                "end_id"
            )
        if chunk < len(thoughts):
            thoughts[chunk].extend(step)
    for chunk, thought in enumerate(thoughts):
        thought.append(thinking.end_id)
        if len(thought) > M:
            raise InputError(
                f"problem {encoded.question!r}: the thought after chunk {chunk} (phase {phase}, {C} tokens a chunk) has "
                f"{len(thought)} tokens, its end included, but max_thought is {M}; raise max_thought, take a smaller chunk, "
                "or give shorter steps"
            )
    return thoughts


def make_batch(
    encoded: Sequence[Encoded],
    seq_len: int,
    thinking: ThinkingConfig | None = None,
    phases: Sequence[int] | None = None,
    *,
    filler_id: int = FILLER_ID,
) -> Batch:
    """Rows of `T = seq_len` tokens, one for each problem, with `phases[b]` fillers (none by default) in front of row b.

    `thinking` is the model's in the arm "thinking", else None. Raises `InputError` if a problem is longer than `T`, a
    thought is longer than `M`, or a phase is not smaller than a chunk.
    """
    phases = [0] * len(encoded) if phases is None else [int(phase) for phase in phases]
    if len(phases) != len(encoded):
        raise InputError(f"give one phase for each problem, got {len(phases)} phases for {len(encoded)} problems")
    tokens = np.full((len(encoded), seq_len + 1), PAD_ID, np.int32)
    weights = np.zeros((len(encoded), seq_len), np.float32)
    shape = (seq_len // thinking.chunk, thinking.max_thought) if thinking else (0, 0)
    thoughts = np.full((len(encoded), *shape), NO_TOKEN, np.int32)
    for row, (problem, phase) in enumerate(zip(encoded, phases, strict=True)):
        if phase < 0 or (thinking and phase >= thinking.chunk):
            accepted = f"from 0 to {thinking.chunk - 1}" if thinking else "at least 0"
            raise InputError(f"a phase must be a number of fillers {accepted}, got {phase}")
        ids = [filler_id] * phase + problem.prompt + problem.continuation
        if len(ids) > seq_len + 1:
            raise InputError(
                f"problem {problem.question!r} has {len(ids)} tokens with its continuation and a phase of {phase}; rows have "
                f"{seq_len} + 1; raise seq_len or give shorter problems"
            )
        tokens[row, : len(ids)] = ids
        weights[row, len(ids) - 1 - len(problem.continuation) : len(ids) - 1] = 1
        if thinking:
            for chunk, thought in enumerate(align(problem, thinking, phase)):
                thoughts[row, chunk, : len(thought)] = thought
    return Batch(tokens, weights, thoughts)
