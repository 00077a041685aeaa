"""Certification of a plan on the device at hand, on its whole compiled program, as part of which it is timed.

A program is certified if the tokens and log-probability bits that it commits, for a batch of made-up requests, are those of
the anchor: the canonical pass of `Schedule.rows` rows in windows of `Schedule.window`, reading what the program committed. At
the first token that the anchor would not have chosen, its target differs.
Plans that differ from the anchor are not used; only the anchor itself failing is an error.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import SCRATCH_PAGE, identity_table
from detspec.config import ModelConfig, Schedule
from detspec.engine.policy import NEVER, Plan
from detspec.engine.programs import prefill_rows, replay_rows, run_segment
from detspec.generate.insert import insert
from detspec.model.params import Params
from detspec.sampling import SamplingParams
from detspec.state import GenState

PROBE_TOKENS = 24
PROBE_PROMPT = 40


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was found out about one plan.

    Attributes:
        plan: the program.
        equal: its committed bits are the anchor's. Never asked of a fast plan, which promises nothing.
        differs: where they first part, for people; "" if they do not.
        step_s: seconds of one step with the batch full.
    """

    plan: Plan
    equal: bool
    differs: str
    step_s: float


def certify(
    params: Params, cfg: ModelConfig, state: GenState, plan: Plan, *, num_pages: int, schedule: Schedule
) -> tuple[Certificate, GenState]:
    """Runs `plan` on made-up requests in the rows of `state`, and replays the result through the anchor.

    All rows must be free, and all `num_pages` pages are written over.
    """
    max_rows, max_len = state.tokens.shape
    pages_each = min(num_pages // plan.batch, state.cache.page_table.shape[1])
    prompts, sampling = _probes(cfg, plan.batch, min(max_len, pages_each * schedule.page), deterministic=not plan.fast)
    rows = np.arange(plan.batch, dtype=np.int32)
    in_use = np.arange(max_rows) < plan.batch
    table = np.full(state.cache.page_table.shape, SCRATCH_PAGE, np.int32)
    table[: plan.batch, :pages_each] = identity_table(plan.batch, pages_each)

    def start(state: GenState, deterministic: bool) -> GenState:
        requested = [dataclasses.replace(s, deterministic=deterministic) for s in sampling]
        state = insert(state, range(plan.batch), prompts, requested, ())
        return prefill_rows(params, cfg, state, in_use, table, np.int32(NEVER), schedule=schedule)

    def segment(state: GenState, steps: int) -> GenState:
        limits = np.int32(steps), np.int32(1), np.int32(NEVER)
        return run_segment(params, cfg, state, in_use, table, rows, *limits, schedule=schedule, plan=plan)[0]

    state = segment(start(state, not plan.fast), 1)  # compiles
    state = jax.block_until_ready(segment(state, max_len))
    tokens, logprobs, committed = (np.asarray(x[: plan.batch]) for x in (state.tokens, state.logprobs, state.committed))
    step_s, state = _time_step(start, segment, state, plan, prompts)
    if plan.fast:
        return Certificate(plan, equal=False, differs="", step_s=step_s), _free(state)

    state = start(state, True)
    length = jnp.zeros(max_rows, jnp.int32).at[rows].set(committed)
    recorded = jnp.zeros((max_rows, max_len), jnp.int32).at[rows].set(tokens)
    replayed, state = replay_rows(params, cfg, state, recorded, length, schedule=schedule)
    anchor_tokens, anchor_logprobs = (np.asarray(x[: plan.batch]) for x in (replayed.targets, replayed.target_logprobs))
    differs = _first_difference(prompts, committed, tokens, logprobs, anchor_tokens, anchor_logprobs)
    return Certificate(plan, equal=not differs, differs=differs, step_s=step_s), _free(state)


def _probes(cfg: ModelConfig, batch: int, max_len: int, *, deterministic: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    """`batch` made-up requests of mixed lengths, greedy and sampled, that fit `max_len`."""
    rng = np.random.default_rng(0)
    num_new = max(1, min(PROBE_TOKENS, max_len // 2))
    longest = max(1, min(PROBE_PROMPT, max_len - num_new))
    prompts = [rng.integers(0, cfg.vocab_size, size=1 + (7 * b) % longest).tolist() for b in range(batch)]
    sampling = [
        SamplingParams(max_tokens=num_new, temperature=float(b % 2), seed=b, ignore_eos=True, deterministic=deterministic)
        for b in range(batch)
    ]
    return prompts, sampling


def _time_step(start, segment, state: GenState, plan: Plan, prompts: list[list[int]]) -> tuple[float, GenState]:  # type: ignore[no-untyped-def]
    """Least seconds of a step over three segments of a few steps: noise only ever adds."""
    steps = max(1, (PROBE_TOKENS // 2) // plan.window)
    seconds = []
    for _ in range(3):
        state = jax.block_until_ready(start(state, not plan.fast))
        began = time.perf_counter()
        state = jax.block_until_ready(segment(state, steps))
        seconds.append((time.perf_counter() - began) / steps)
    return min(seconds), state


def _free(state: GenState) -> GenState:
    """`state` with no row live."""
    return state.replace(live=jnp.zeros_like(state.live))


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
