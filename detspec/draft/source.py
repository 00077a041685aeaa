"""A draft source: a pair of pure functions, what they cost, and how many tokens a sequence may draft.

    state = source.init(cfg, schedule, gen_state)                              a cache of its own, or nothing
    draft = source.draft(draft_params, params, cfg, gen_state, schedule, D)    reads `gen_state.draft`, gives `draft.state`

A source drafts at most `D` tokens for each sequence, and writes only cache slots that verification rewrites.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.schedule import Schedule
from detspec.state import NO_DRAFT_STATE, Draft, DraftState, GenState

DraftParams = Any
DraftFn = Callable[[Params, ModelConfig, GenState], Draft]


class DraftSource(NamedTuple):
    """How tokens are drafted. Static and hashable: module-level functions, whose weights are an argument."""

    name: str  # name in plans and tables
    # `(cfg, schedule, state) -> DraftState` that knows nothing yet, for states of these shapes
    init: Callable[[ModelConfig, Schedule, GenState], DraftState]
    # `(draft_params, params, cfg, state, schedule, D) -> Draft` of `D` tokens, at least 1 if it drafts any
    draft: Callable[[DraftParams, Params, ModelConfig, GenState, Schedule, int], Draft]
    # `(D, seconds of an ordinary step) -> seconds` that drafting `D` tokens is believed to take
    cost_s: Callable[[int, float], float]
    executes: bool  # it runs the model itself, so ordinary sequences may take its tokens as results
    prior_acceptance: float  # assumed chance that a drafted token agrees, 0 to 1, until it is measured
    searches: bool = False  # it finds its tokens in the sequence's own text, and often none
    derive: Callable[[Params, ModelConfig], DraftParams] | None = None  # makes the source's weights from the model's


class Drafter(NamedTuple):
    """A draft source and its weights, or whatever else its functions read."""

    source: DraftSource  # how it drafts
    params: DraftParams = ()  # weights, an argument of the programs


def draft_fn(drafter: Drafter, schedule: Schedule, num_tokens: int | None = None) -> DraftFn:
    """`drafter` as `dvr_step` takes it, within one trace: drafts `num_tokens`, by default what fits a window of `schedule`."""
    num_tokens = schedule.budget.window - 1 if num_tokens is None else num_tokens
    return lambda params, cfg, state: drafter.source.draft(drafter.params, params, cfg, state, schedule, num_tokens)


def no_state(cfg: ModelConfig, schedule: Schedule, state: GenState) -> DraftState:
    """`DraftSource.init` of a source that keeps nothing between steps."""
    return NO_DRAFT_STATE


def costs_nothing(num_tokens: int, ordinary_step_s: float) -> float:
    """`DraftSource.cost_s` of a source that runs no model."""
    return 0.0


def draft_limit(state: GenState, num_tokens: int, final: jax.Array) -> jax.Array:
    """Most tokens each sequence may draft, `[B]` int32: `num_tokens`, or what its remaining length leaves.

    A verified sequence gets one token more than it drafted, so it may draft `limit - committed - 1`. A `final [B]` sequence
    commits its drafts as they are.
    """
    remaining = state.limit - state.committed - (~final).astype(jnp.int32)
    return jnp.where(state.ready, jnp.clip(remaining, 0, num_tokens), 0)
