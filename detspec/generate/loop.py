"""One step, `dvr_step`, and the loop that runs it on the device."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.draft.draft_fn import DraftFn
from detspec.draft.none import no_draft
from detspec.draft.self_draft import self_draft
from detspec.environment import chosen_schedule
from detspec.errors import InputError
from detspec.generate.commit import commit
from detspec.generate.insert import start_state
from detspec.generate.prefill import prefill
from detspec.generate.verify import unverified, verify
from detspec.model.params import Params
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from detspec.state import GenState
from detspec.thinking.think_prompt import GuessFn, read


def dvr_step(params: Params, cfg: ModelConfig, state: GenState, *, draft_fn: DraftFn, schedule: Schedule) -> GenState:
    """Draft, verify, commit: every live row gains at least one committed token."""
    draft = draft_fn(params, cfg, state)
    verified = verify(params, cfg, state, draft, schedule=schedule)
    return commit(state, draft, verified)


def fast_step(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Ordinary decoding: one token of the fast path for every live row, none of them deterministic, committed unverified."""
    draft = self_draft(2, schedule)(params, cfg, state)
    return commit(state, draft, unverified(draft))


def default_draft(schedule: Schedule) -> DraftFn:
    """The self draft for windows of several tokens, no draft for windows of one."""
    return no_draft if schedule.budget.window == 1 else self_draft(schedule.budget.window, schedule)


def run(
    state: GenState,
    step_fn: Callable[[GenState], GenState],
    *,
    max_steps: jax.Array,
    min_live: jax.Array,
    num_rows: jax.Array | None = None,
    max_idle: jax.Array | None = None,
) -> tuple[GenState, jax.Array]:
    """Steps under `lax.while_loop`, up to `max_steps` times, for as long as at least `min_live` (>= 1) rows are live.

    With `max_idle` it also ends when those of `num_rows` that are not live have idled for so many steps, added up.

    Returns:
        The state, and how many steps there were, int32.
    """

    def going(carry: tuple[jax.Array, jax.Array, GenState]) -> jax.Array:
        step, idle, state = carry
        more = (step < max_steps) & (state.live.sum(dtype=jnp.int32) >= min_live)
        return more if max_idle is None else more & (idle < max_idle)

    def body(carry: tuple[jax.Array, jax.Array, GenState]) -> tuple[jax.Array, jax.Array, GenState]:
        step, idle, state = carry
        state = step_fn(state)
        if num_rows is not None:
            idle += num_rows - state.live.sum(dtype=jnp.int32)
        return step + 1, idle, state

    steps, _, state = jax.lax.while_loop(going, body, (jnp.int32(0), jnp.int32(0), state))
    return state, steps


def generate(
    params: Params,
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    eos_ids: Sequence[int] = (),
    schedule: Schedule | None = None,
    draft_fn: DraftFn | None = None,
    max_len: int | None = None,
) -> GenState:
    """Generates for all prompts in one jit-compiled program, for notebooks and ablations.

    Args:
        params, cfg: the model.
        prompts: token ids of `B` prompts.
        sampling: for all prompts, or one each.
        eos_ids: tokens that end a row that does not ignore them.
        schedule: of the canonical pass; the device's default if None.
        draft_fn: what guesses; by default the self draft, or none for windows of one.
        max_len: positions a row can hold; by default just enough.

    Returns:
        The final state: row `b` holds `committed[b]` tokens in `tokens[b]`, with `logprobs[b]` beside them.

    Raises:
        InputError: a prompt is empty, holds an id outside the vocabulary, or does not fit `max_len` with its `max_tokens`;
            the device does not run what the schedule names.
    """
    schedule = chosen_schedule(schedule, cfg)
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(each)} sampling parameters: give one for all, or one each")
    max_len = max_len or max(max(len(p) + s.max_tokens for p, s in zip(prompts, each, strict=True)), schedule.budget.window)
    state = start_state(cfg, prompts, each, eos_ids=eos_ids, max_len=max_len, schedule=schedule)
    return generate_state(params, cfg, state, schedule=schedule, draft_fn=draft_fn)


@partial(jax.jit, static_argnames=("cfg", "schedule", "draft_fn", "guess_fn"), donate_argnames=("state",))
def generate_state(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    schedule: Schedule,
    draft_fn: DraftFn | None = None,
    guess_fn: GuessFn | None = None,
) -> GenState:
    """Reads the prompts and runs `state` until no row is live: the functional core as one program."""
    if state.reading is not None:
        state = read(params, cfg, state, schedule=schedule, guess_fn=guess_fn)
    state = prefill(params, cfg, state, schedule=schedule)
    step_fn = partial(dvr_step, params, cfg, draft_fn=draft_fn or default_draft(schedule), schedule=schedule)
    state, _ = run(state, step_fn, max_steps=jnp.int32(state.tokens.shape[1]), min_live=jnp.int32(1))
    return state
