"""Prompts of drawn problems, as states that are ready to be read."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.draft.given import NONE
from detspec.draft.source import Drafter, draft_fn
from detspec.generation.init import start_state
from detspec.generation.loop import Limits, dvr_step, run
from detspec.generation.prefill import prefill, read_by_riders
from detspec.mesh import place_of, put
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.thinking.drafts import DRAFTED
from detspec.thinking.reading import reading_of
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem
from detspec.train.problems.tasks import Task, tokenizer_of
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
    max_len: int | None = None,
    thoughts: jax.Array | None = None,
) -> GenState:
    """The state of `prompts`, greedy, nothing read.

    Args:
        model: the model that reads them.
        prompts: token ids.
        max_tokens: at most so many new ones.
        schedule: that it is read by.
        max_len: positions of a row; by default just enough.
        thoughts: drafts `[B, X, M]`; trivial ones by default.
    """
    max_len = schedule.numerics.whole_pages(max_len or max(map(len, prompts)) + max_tokens)
    sampling = [SamplingParams(max_tokens=max_tokens)] * len(prompts)
    state = start_state(model.cfg, prompts, sampling, eos_ids=(END_ID,), max_len=max_len, schedule=schedule)
    if thoughts is not None:
        state = state.having(thoughts=reading_of(state).replace(thoughts=jnp.copy(thoughts)))
    return put(state, place_of(model.cfg, model.params))


@partial(jax.jit, static_argnames=("cfg", "schedule", "source"), donate_argnames=("state",))
def draft_thoughts(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, source: str) -> GenState:
    """Thoughts drafted as `source` says, one of `DRAFTED`: `read_prompts` is then one program for all of them."""
    return DRAFTED[source](params, cfg, state, schedule)


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def read_prompts(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Everything before the first new token: the thoughts of a model that thinks, then the rest of the prompts."""
    state = read_by_riders(params, cfg, state, schedule=schedule)
    return prefill(params, cfg, state, schedule=schedule)


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def decode(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Everything after `read_prompts`, one canonical token of each row a pass, as the engine decodes where that is cheapest."""
    no_draft = draft_fn(Drafter(NONE), schedule)

    def step(state: GenState) -> GenState:
        return dvr_step(params, cfg, state, draft_fn=no_draft, schedule=schedule)[0]

    return run(state, step, limits=Limits(state.tokens.shape[1]))[0]
