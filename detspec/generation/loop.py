"""A step of drafting and verifying, `dvr_step`, and the loop that runs it on the device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detspec.cache import check_seats
from detspec.config import ModelConfig
from detspec.draft.given import NONE
from detspec.draft.self_draft import SELF
from detspec.draft.source import Drafter, DraftFn, DraftParams, DraftSource, draft_fn
from detspec.environment import chosen_schedule
from detspec.errors import InputError, shortened, shown
from detspec.generation.checks import check_core, check_known, each_sampling, is_traced, listed_prompts, without_derivative
from detspec.generation.commit import commit
from detspec.generation.init import start_state
from detspec.generation.prefill import prefill, read_by_riders
from detspec.generation.verify import verify
from detspec.held import Jitted
from detspec.mesh import check_one_chip
from detspec.model.params import Params
from detspec.plain import plain_ids
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Schedule
from detspec.state import Draft, GenState, Verified

NEVER = 2**30


class Step(NamedTuple):
    """Drafts of a step, and the verdict of its canonical pass. XLA drops what a caller does not use."""

    draft: Draft
    verified: Verified


def dvr_step(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    draft_fn: DraftFn,
    schedule: Schedule,
    narrow: Budget | None = None,
    wide_cost: jax.Array | float = 0.0,
) -> tuple[GenState, Step]:
    """Draft, verify, commit: every live sequence gains at least one committed token. `verify` takes the last two arguments."""
    with jax.named_scope("draft"):
        draft = draft_fn(params, cfg, state)
    verified = verify(params, cfg, state, draft, schedule=schedule, narrow=narrow, wide_cost=wide_cost)
    return commit(state, draft, verified), Step(draft, verified)


def ordinary_step(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Ordinary decoding: one token of the fast path for every live sequence, none deterministic, committed unverified."""
    draft = SELF.draft((), params, cfg, state, schedule, 1)
    return commit(state, draft)


def default_source(schedule: Schedule) -> DraftSource:
    """The self draft for windows of several tokens, no draft for windows of one."""
    return NONE if schedule.budget.window == 1 else SELF


class Limits(NamedTuple):
    """When `run` ends, int32 scalars."""

    steps: Any  # after so many steps
    min_live: Any = 1  # when fewer sequences than this are live; at least 1
    max_idle: Any = NEVER  # when ended sequences have wasted so many steps in total
    max_gain: Any = NEVER  # when a sequence has gained more tokens than this


def run(
    state: GenState, step_fn: Callable[[GenState], GenState], *, limits: Limits, num_sequences: jax.Array | None = None
) -> tuple[GenState, jax.Array]:
    """Steps `state` under `lax.while_loop` until one of `limits` is reached; returns it and how many steps there were, int32.

    `num_sequences`, int32, is how many sequences are in use: those of them that are not live idle. None counts no idling.
    """

    def going(carry: _Run) -> jax.Array:
        is_live = carry.state.live.sum(dtype=jnp.int32) >= limits.min_live
        gain = (carry.state.committed - state.committed).max()
        return (carry.step < limits.steps) & is_live & (carry.idle < limits.max_idle) & (gain <= limits.max_gain)

    def body(carry: _Run) -> _Run:
        state = step_fn(carry.state)
        idle = jnp.int32(0) if num_sequences is None else num_sequences - state.live.sum(dtype=jnp.int32)
        return _Run(carry.step + 1, carry.idle + idle, state)

    done = jax.lax.while_loop(going, body, _Run(jnp.int32(0), jnp.int32(0), state))
    return done.state, done.step


class _Run(NamedTuple):
    """Carry of the loop over steps."""

    step: jax.Array  # int32, steps so far
    idle: jax.Array  # int32, steps that ended sequences have wasted in total
    state: GenState


def generate(
    params: Params,
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    eos_ids: Sequence[int] = (),
    schedule: Schedule | None = None,
    drafter: Drafter | None = None,
) -> GenState:
    """Generates for all prompts in one jit-compiled program, for notebooks and ablations.

    Every sequence gets the whole cache pages that the longest one takes, so calls of like lengths share a program.

    With pinned products, or weights in int8, committed bits are those of an engine with this schedule. With XLA's products of
    floats nothing certifies that they are: XLA may cut a product by what else its program works out. An engine reads prompts by
    the program of its replays, by which it certifies its steps; this program is neither.

    jax.jit and jax.vmap may take the weights, with the same bits. There is no derivative.

    Args:
        params: weights, as `Model.params`.
        cfg: shape of the model, as `Model.cfg`.
        prompts: token ids of `B` prompts, each in a list, a tuple, a range or an array; or in the rows of one array.
        sampling: sampling parameters for all prompts, or one each.
        eos_ids: tokens that end a sequence that does not ignore them.
        schedule: numerics and budget of the canonical pass; the device's default if None.
        drafter: the draft source; by default the self draft, or none for windows of one.

    Returns:
        The final state: sequence `b` holds `committed[b]` tokens in `tokens[b]`, with their `logprobs[b]`.

    Raises:
        InputError: there is no prompt, or one is empty or holds an id outside the vocabulary; one takes more positions than the
            model was made for; `sampling` asks for what an engine alone gives, see `check_core`; the device does not run what
            the schedule names; the weights lie on several chips.
    """
    check_one_chip(params, "generate")
    check_known(prompts, "detspec.generate")
    if is_traced(params):
        params = without_derivative(params, "detspec.generate")
    schedule = chosen_schedule(schedule, cfg)
    prompts = [plain_ids(prompt) for prompt in listed_prompts(prompts)]
    if not prompts:
        raise InputError("there are no prompts: give at least one")
    each = each_sampling(sampling, len(prompts))
    for one in each:
        check_core(one)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise InputError(
            "drafter must be a Drafter, such as Drafter(detspec.draft.table.source_of('ngram')), got "
            f"{shortened(shown(drafter), 80)}"
        )
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, each, strict=True))
    if longest > cfg.max_position:
        raise InputError(f"a prompt and its max_tokens take {longest} positions, the model was made for {cfg.max_position}")
    max_len = schedule.numerics.whole_pages(max(longest, schedule.budget.window))
    state = start_state(cfg, prompts, each, eos_ids=eos_ids, max_len=max_len, schedule=schedule)
    source, draft_params = drafter or Drafter(default_source(schedule))
    check_seats(cfg, schedule.numerics, 0 if source == NONE else schedule.budget.window - 1)
    return generate_state(params, cfg, state, schedule=schedule, source=source, draft_params=draft_params)


@partial(Jitted, static_argnames=("cfg", "schedule", "source"), donate_argnames=("state",))
def generate_state(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    schedule: Schedule,
    source: DraftSource | None = None,
    draft_params: DraftParams = (),
) -> GenState:
    """Reads the prompts and runs `state` until no sequence is live: the functional core as one program.

    `source` drafts by `draft_params`, from a new state of its own; None is the self draft, or none for windows of one.
    """
    source = source or default_source(schedule)
    state = read_by_riders(params, cfg, state, schedule=schedule)
    state = prefill(params, cfg, state, schedule=schedule)
    state = state.replace(draft=source.init(cfg, schedule, state))
    own_draft_fn = draft_fn(Drafter(source, draft_params), schedule)

    def step(state: GenState) -> GenState:
        return dvr_step(params, cfg, state, draft_fn=own_draft_fn, schedule=schedule)[0]

    return run(state, step, limits=Limits(state.tokens.shape[1]))[0]
