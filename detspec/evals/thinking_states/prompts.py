"""Prompts of drawn problems, as states that are ready to be read."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, Schedule
from detspec.generate.insert import start_state
from detspec.generate.prefill import prefill
from detspec.model.params import Params
from detspec.sampling import SamplingParams
from detspec.state import GenState
from detspec.thinking.reading import GuessFn, read
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem
from detspec.train.problems.task import Task, tokenizer_of
from detspec.train.problems.words import END_ID


def draw_problems(task: Task, *, num_ops: int, number: int, seed: int) -> list[Problem]:
    """`number` problems of `num_ops` operations."""
    rng = np.random.default_rng((seed, num_ops))
    return [task.draw(rng, num_ops) for _ in range(number)]


def prompts_of(task: Task, problems: Sequence[Problem], arm: str) -> list[list[int]]:
    """The token ids that a model trained on `task` in `arm` reads of `problems`."""
    return [one.prompt for one in encode(problems, tokenizer_of(task), arm)]


def ready_state(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    schedule: Schedule,
    deterministic: bool = True,
    thoughts: jax.Array | None = None,
) -> GenState:
    """The state of `prompts`, greedy, nothing read; with guessed `thoughts [B, X, M]` if they are given."""
    sampling = [SamplingParams(max_tokens=max_tokens, deterministic=deterministic)] * len(prompts)
    max_len = -(-(max(map(len, prompts)) + max_tokens) // schedule.page) * schedule.page
    state = start_state(model.cfg, prompts, sampling, eos_ids=(END_ID,), max_len=max_len, schedule=schedule)
    if thoughts is None:
        return state
    assert state.reading is not None
    return state.replace(reading=state.reading.replace(thoughts=jnp.copy(thoughts)))


@partial(jax.jit, static_argnames=("cfg", "schedule", "guess_fn"), donate_argnames=("state",))
def read_prompts(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, guess_fn: GuessFn | None = None
) -> GenState:
    """Everything before the first new token: thoughts, where the model thinks, then the rest of the prompts."""
    if state.reading is not None:
        state = read(params, cfg, state, schedule=schedule, guess_fn=guess_fn)
    return prefill(params, cfg, state, schedule=schedule)
