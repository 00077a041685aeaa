"""How many problems a trained model solves, by how many operations they have: generated, not teacher-forced."""

from collections.abc import Sequence

import numpy as np
import tokenizers
from tqdm import tqdm

from detspec.config import ModelConfig
from detspec.environment import chosen_schedule
from detspec.generate.init import start_state
from detspec.generate.loop import generate_state
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem, read_answer
from detspec.train.problems.task import Task
from detspec.train.problems.words import END_ID

EVAL_SEED = 2**32  # apart from the seeds of training batches
BATCH = 32


def accuracy_by_operations(
    params: Params,
    cfg: ModelConfig,
    task: Task,
    tokenizer: tokenizers.Tokenizer,
    arm: str,
    *,
    num_ops: Sequence[int],
    num_problems: int,
    seed: int,
    end_id: int = END_ID,
) -> dict[int, float]:
    """Share of right answers, 0 to 1, to `num_problems` new problems for each of `num_ops`, greedily generated in `arm`."""
    drawn = {}
    for n in num_ops:
        rng = np.random.default_rng((seed, EVAL_SEED, n))
        drawn[n] = [task.draw(rng, n) for _ in range(num_problems)]
    # Room for the longest, whatever is asked: each length of a cache is a program of its own, and compiling takes longest.
    max_len = max(longest(problems, tokenizer, arm) for problems in drawn.values())
    accuracy = {}
    for n, problems in tqdm(drawn.items(), desc="accuracy", unit="length", disable=None):
        answers = answers_to(params, cfg, problems, tokenizer, arm, end_id=end_id, max_len=max_len)
        right = [answer == problem.answer for answer, problem in zip(answers, problems, strict=True)]
        accuracy[n] = float(np.mean(right))
    return accuracy


def answers_to(
    params: Params,
    cfg: ModelConfig,
    problems: Sequence[Problem],
    tokenizer: tokenizers.Tokenizer,
    arm: str,
    *,
    end_id: int = END_ID,
    max_len: int | None = None,
) -> list[str | None]:
    """The generated answers to `problems`, up to `end_id`, None where there is none; `max_len` by default just enough."""
    encoded = encode(problems, tokenizer, arm)
    # Room for what a right continuation takes: who needs more is wrong.
    room = max(len(one.continuation) for one in encoded)
    schedule = chosen_schedule(None, cfg)
    schedule = schedule.with_budget(schedule.budget.rows, 1)  # compiling a draft takes longer than these short texts
    max_len = schedule.numerics.whole_pages(max_len or longest(problems, tokenizer, arm))
    answers: list[str | None] = []
    for start in range(0, len(problems), BATCH):
        batch = encoded[start : start + BATCH]
        batch = [*batch, *batch[:1] * (BATCH - len(batch))]
        prompts, sampling = [one.prompt for one in batch], [SamplingParams(max_tokens=room)] * BATCH
        state = start_state(cfg, prompts, sampling, eos_ids=(end_id,), max_len=max_len, schedule=schedule)
        state = generate_state(params, cfg, state, schedule=schedule)
        tokens, committed = np.asarray(state.tokens), np.asarray(state.committed)
        new = [tokens[b, len(one.prompt) : committed[b]].tolist() for b, one in enumerate(batch)]
        texts = tokenizer.decode_batch(new, skip_special_tokens=True)
        answers.extend(read_answer(text, arm) for text in texts[: len(problems) - start])
    return answers


def longest(problems: Sequence[Problem], tokenizer: tokenizers.Tokenizer, arm: str) -> int:
    """Tokens of the longest prompt and the longest continuation together."""
    encoded = encode(problems, tokenizer, arm)
    return max(len(one.prompt) for one in encoded) + max(len(one.continuation) for one in encoded)
