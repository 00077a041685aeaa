"""Forced thoughts: a wrong one in the middle of a prompt must change the answer, else the model does not use thoughts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.environment import chosen_schedule
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.thinking.blocks import compress
from detspec.thinking.reading import reading_of
from detspec.thinking.think_prompt import think_prompt
from detspec.train.problems.problem import Problem
from detspec.train.problems.tasks import SIDES, Parity, tokenizer_of
from scripts.replications.thinking_states.prompts import decode, draw_problems, prompts_of, read_prompts, ready_state

MAX_TOKENS = 2  # the answer and its end


def forced_flips(model: Model, *, num_ops: Sequence[int], num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Shares of answers to coin flips that change when the thought in the middle of the prompt is forced.

    Args:
        model: trained on `Parity`, in the arm "thinking".
        num_ops: operations of a problem.
        num_problems: problems drawn for each of `num_ops`; those without heads or tails among their thoughts are left out.
        seed: problems are drawn from it.

    Returns:
        For each of `num_ops`: "problems", the number that count; "right", the share of right answers when nothing is forced;
        "flipped", the share of answers that change when heads and tails are exchanged in the middle thought; "flipped_by_own",
        the same when the middle thought is forced to be the model's own, which must be 0.
    """
    drawn = {n: draw_problems(Parity(), num_ops=n, number=num_problems, seed=seed) for n in num_ops}
    prompts = {n: prompts_of(Parity(), problems, "thinking") for n, problems in drawn.items()}
    room = max(len(prompt) for each in prompts.values() for prompt in each) + MAX_TOKENS  # one shape, for shared programs
    return [{"num_ops": n, **_flips(model, prompts[n], drawn[n], room)} for n in num_ops]


def _flips(model: Model, prompts: Sequence[Sequence[int]], problems: Sequence[Problem], max_len: int) -> dict[str, Any]:
    tokenizer = tokenizer_of(Parity())
    num_problems = len(problems)
    schedule = chosen_schedule(None, model.cfg)
    start = partial(ready_state, model, prompts, max_tokens=MAX_TOKENS, max_len=max_len, schedule=schedule)
    answer = partial(decode, model.params, model.cfg, schedule=schedule.with_budget(num_problems, 1))
    free = answer(read_prompts(model.params, model.cfg, start(), schedule=schedule))
    thoughts = np.asarray(reading_of(free).thoughts)
    end = np.asarray(reading_of(free).end)
    heads, tails = (tokenizer.encode(side).ids[0] for side in SIDES)
    has_side = ((thoughts == heads) | (thoughts == tails)).any(2) & (np.arange(thoughts.shape[1]) < end[:, None])
    place = np.array([middle(there) for there in has_side])
    counted = place >= 0
    own = thoughts[np.arange(num_problems), place]
    wrong = np.where(own == heads, tails, np.where(own == tails, heads, own))

    def answers(state: GenState) -> np.ndarray:
        tokens = np.asarray(state.tokens)
        return np.array([tokens[b, len(prompt)] for b, prompt in enumerate(prompts)])

    def flipped(given: np.ndarray) -> float:
        at = jnp.asarray(np.maximum(place, 0), jnp.int32)
        state = read_forced(model.params, model.cfg, start(), at, jnp.asarray(given), schedule=schedule)
        state = answer(read_prompts(model.params, model.cfg, state, schedule=schedule))
        return float(np.mean((answers(state) != answers(free))[counted])) if counted.any() else 0.0

    gold = np.array([tokenizer.encode(problem.answer).ids[0] for problem in problems])
    return {
        "problems": int(counted.sum()),
        "right": float(np.mean(answers(free) == gold)),
        "flipped": flipped(wrong),
        "flipped_by_own": flipped(own),
    }


@partial(jax.jit, static_argnames=("cfg", "schedule"), donate_argnames=("state",))
def read_forced(
    params: Params, cfg: ModelConfig, state: GenState, place: jax.Array, thoughts: jax.Array, *, schedule: Schedule
) -> GenState:
    """Reads the prompts of all rows; the thought after one chunk of each is the given one, committed unverified.

    Args:
        params, cfg: a model that thinks.
        state: rows that have read nothing.
        place: `[B]` int32, a chunk that a thought follows.
        thoughts: `[B, M]` int32, the thought after it.
        schedule: the schedule of the canonical passes.
    """
    end = reading_of(state).end
    # Reading stops behind the chunk, for it is told that the prompt's last thought is there.
    state = think_prompt(params, cfg, state.having(thoughts=reading_of(state).replace(end=place + 1)), schedule=schedule)
    row = jnp.arange(place.shape[0], dtype=jnp.int32)
    reading = reading_of(state).replace(
        thoughts=reading_of(state).thoughts.at[row, place].set(thoughts),
        states=compress(params, cfg, thoughts, numerics=schedule.numerics),
        end=end,
    )
    return think_prompt(params, cfg, state.having(thoughts=reading), schedule=schedule)


def middle(there: np.ndarray) -> int:
    """The middle one of the places where `there [X]` is True; -1 if there is none."""
    (places,) = np.nonzero(there)
    return int(places[len(places) // 2]) if len(places) else -1
