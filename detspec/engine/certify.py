"""Certification of a plan on the device at hand, on its whole compiled program.

A program is certified if the tokens and log-probability bits that it commits, for a batch of made-up requests, are those of
the anchor: the canonical pass of `Budget.rows` rows in windows of `Budget.window`, reading what the program committed. At
the first token that the anchor would not have chosen, its target differs.
Plans that differ from the anchor are not used; only the anchor itself failing is an error.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.engine.policy import Plan
from detspec.engine.programs import replay_rows
from detspec.engine.trial import Trial
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.thinking.thoughts import thought_lists


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was found out about one plan.

    Attributes:
        plan: the program.
        equal: its committed bits are the anchor's. Never asked of a fast plan, which promises nothing.
        differs: where they first part, for people; "" if they do not.
        step_s: seconds of one step with the batch full, when it was last timed beside others; inf if it never was.
    """

    plan: Plan
    equal: bool
    differs: str
    step_s: float = float("inf")


def certify(
    params: Params, cfg: ModelConfig, state: GenState, trial: Trial, *, schedule: Schedule
) -> tuple[Certificate, GenState]:
    """Compiles the plan of `trial`, runs it, and replays the result through the anchor; fast plans are compiled alone."""
    max_requests, max_len = state.tokens.shape
    plan, rows = trial.plan, trial.rows
    state = trial.step(trial.start(state, deterministic=not plan.fast), max_len)
    if plan.fast:
        return Certificate(plan, equal=False, differs=""), state
    tokens, logprobs, committed = (np.asarray(x[: plan.batch]) for x in (state.tokens, state.logprobs, state.committed))
    state = trial.start(state, deterministic=True)
    length = jnp.zeros(max_requests, jnp.int32).at[rows].set(committed)
    recorded = jnp.zeros((max_requests, max_len), jnp.int32).at[rows].set(tokens)
    replayed, state = replay_rows(params, cfg, state, recorded, length, schedule=schedule)
    anchor_tokens, anchor_logprobs = (np.asarray(x[: plan.batch]) for x in (replayed.targets, replayed.target_logprobs))
    differs = _first_difference(trial.prompts, committed, tokens, logprobs, anchor_tokens, anchor_logprobs)
    return Certificate(plan, equal=not differs, differs=differs), state


def certify_reading(state: GenState, trial: Trial) -> tuple[str, GenState]:
    """Where a model's thoughts about made-up prompts depend on their rows or on what was guessed; "" if nowhere.

    The prompts are read twice by the program that the engine reads with: with trivial guesses, and then in reversed rows with
    the thoughts that were found, every third of them changed. Thoughts and bits of states must be the same.
    """
    batch = trial.plan.batch

    def read(state: GenState, **how: Any) -> tuple[np.ndarray, np.ndarray, GenState]:
        state = trial.start(state, deterministic=True, **how)
        assert state.reading is not None
        thoughts, states = (np.asarray(x[:batch]) for x in (state.reading.thoughts, state.reading.states))
        return thoughts, states.view(f"u{states.dtype.itemsize}"), state

    thoughts, states, state = read(state)
    assert state.reading is not None
    num_read = np.asarray(state.reading.read[:batch])
    guesses = [thought_lists(thoughts[b, : num_read[b]]) for b in range(batch)]
    for thought in [thought for of_row in guesses for thought in of_row][::3]:
        thought[0] = (thought[0] + 1) % trial.vocab_size
    thoughts_again, states_again, state = read(state, reverse=True, thoughts=guesses)
    differs = ""
    for b in range(batch):
        row = batch - 1 - b
        chunks = [i for i in range(num_read[b]) if not np.array_equal(thoughts[b, i], thoughts_again[row, i])]
        if chunks:
            found, again = (thought_lists(each[None])[0] for each in (thoughts[b, chunks[0]], thoughts_again[row, chunks[0]]))
            differs = f"the thought of row {b} after chunk {chunks[0]} is {found}, in row {row} after other guesses {again}"
        elif not np.array_equal(states[b], states_again[row]):
            differs = f"the states of row {b} after its last thought have other bits in row {row}"
        if differs:
            break
    return differs, state


def _first_difference(
    prompts: list[list[int]],
    committed: np.ndarray,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    anchor_tokens: np.ndarray,
    anchor_logprobs: np.ndarray,
) -> str:
    """The first row and new position where tokens or log-probability bits differ, as a sentence; "" if nowhere."""
    position = np.arange(tokens.shape[1])[None, :]
    prompt_len = np.asarray([len(prompt) for prompt in prompts])
    new = (position >= prompt_len[:, None]) & (position < committed[:, None])
    differs = (tokens != anchor_tokens) | (logprobs.view(np.uint32) != anchor_logprobs.view(np.uint32))
    if not (differs & new).any():
        return ""
    row, position = np.argwhere(differs & new)[0]
    return (
        f"row {row} at position {position} ({position - prompt_len[row]} tokens after the prompt): "
        f"token {tokens[row, position]} and log-probability {logprobs[row, position]!r}, "
        f"the anchor has {anchor_tokens[row, position]} and {anchor_logprobs[row, position]!r}"
    )
