"""Accuracy of a trained model by number of operations: answers are generated, not teacher-forced."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tqdm import tqdm

from detspec.config import ModelConfig
from detspec.environment import chosen_schedule
from detspec.generation.init import start_state
from detspec.generation.loop import generate_state
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem, read_answer
from detspec.train.problems.tasks import Task
from detspec.train.problems.words import END_ID

EVAL_SEED = 2**32  # differs from every seed of a training batch
BATCH = 32


class Trained(NamedTuple):
    """A trained model, the arm it was trained in, its tokenizer, and the token that ends its texts."""

    params: Params
    cfg: ModelConfig
    tokenizer: tokenizers.Tokenizer
    arm: str
    end_id: int = END_ID


def accuracy_by_operations(
    model: Trained, task: Task, *, num_ops: Sequence[int], num_problems: int, seed: int
) -> dict[int, float]:
    """Accuracy, 0 to 1, of greedily generated answers: `num_problems` new problems for each of `num_ops`."""
    drawn = {}
    for n in num_ops:
        rng = np.random.default_rng((seed, EVAL_SEED, n))
        drawn[n] = [task.draw(rng, n) for _ in range(num_problems)]
    # Every batch has room for the longest problem: each cache length compiles its own program, which takes longest.
    max_len = max(longest(problems, model.tokenizer, model.arm) for problems in drawn.values())
    accuracy = {}
    for n, problems in tqdm(drawn.items(), desc="accuracy", unit="length", disable=None):
        answers = answers_to(model, problems, max_len=max_len)
        right = [answer == problem.answer for answer, problem in zip(answers, problems, strict=True)]
        accuracy[n] = float(np.mean(right))
    return accuracy


def answers_to(model: Trained, problems: Sequence[Problem], *, max_len: int) -> list[str | None]:
    """Generated answers to `problems`, each up to `end_id`; None where there is none. `max_len` tokens hold each text."""
    encoded = encode(problems, model.tokenizer, model.arm)
    room = max(len(one.continuation) for one in encoded)  # a longer continuation is wrong
    schedule = chosen_schedule(None, model.cfg)
    schedule = schedule.with_budget(schedule.budget.rows, 1)  # compiling a draft takes longer than these short texts
    max_len = schedule.numerics.whole_pages(max_len)
    answers: list[str | None] = []
    for start in range(0, len(problems), BATCH):
        batch = encoded[start : start + BATCH]
        batch = [*batch, *batch[:1] * (BATCH - len(batch))]
        prompts = [one.prompt for one in batch]
        sampling = [SamplingParams(max_tokens=room)] * BATCH
        state = start_state(model.cfg, prompts, sampling, eos_ids=(model.end_id,), max_len=max_len, schedule=schedule)
        state = generate_state(model.params, model.cfg, state, schedule=schedule)
        tokens = np.asarray(state.tokens)
        committed = np.asarray(state.committed)
        new = [tokens[b, len(one.prompt) : committed[b]].tolist() for b, one in enumerate(batch)]
        texts = model.tokenizer.decode_batch(new, skip_special_tokens=True)
        answers.extend(read_answer(text, model.arm) for text in texts[: len(problems) - start])
    return answers


def longest(problems: Sequence[Problem], tokenizer: tokenizers.Tokenizer, arm: str) -> int:
    """Number of tokens of the longest prompt plus the longest continuation."""
    encoded = encode(problems, tokenizer, arm)
    return max(len(one.prompt) for one in encoded) + max(len(one.continuation) for one in encoded)
