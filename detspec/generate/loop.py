"""One step, `dvr_step`, and the loop that runs it on the device."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import init_cache
from detspec.config import ModelConfig, Schedule
from detspec.draft.draft_fn import DraftFn
from detspec.draft.none import no_draft
from detspec.draft.self_draft import self_draft
from detspec.errors import InputError
from detspec.generate.commit import commit
from detspec.generate.prefill import prefill
from detspec.generate.verify import verify
from detspec.model.params import Params
from detspec.sampling import SamplingParams, row_sampling
from detspec.state import NO_TOKEN, PAD_ID, RUNNING, GenState, init_counters


def dvr_step(params: Params, cfg: ModelConfig, state: GenState, *, draft_fn: DraftFn, schedule: Schedule) -> GenState:
    """Draft, verify, commit: every live row gains at least one committed token."""
    draft = draft_fn(params, cfg, state)
    verified = verify(params, cfg, state, draft, schedule=schedule)
    return commit(state, draft, verified)


def default_draft(schedule: Schedule) -> DraftFn:
    """The self draft for windows of several tokens, no draft for windows of one."""
    return no_draft if schedule.window == 1 else self_draft(schedule.window, schedule)


def run(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    draft_fn: DraftFn,
    schedule: Schedule,
    max_steps: jax.Array,
    min_live: jax.Array,
) -> GenState:
    """Steps under `lax.while_loop`, up to `max_steps` times, for as long as at least `min_live` (>= 1) rows are live."""

    def going(carry: tuple[jax.Array, GenState]) -> jax.Array:
        step, state = carry
        return (step < max_steps) & (state.live.sum(dtype=jnp.int32) >= min_live)

    def body(carry: tuple[jax.Array, GenState]) -> tuple[jax.Array, GenState]:
        step, state = carry
        return step + 1, dvr_step(params, cfg, state, draft_fn=draft_fn, schedule=schedule)

    _, state = jax.lax.while_loop(going, body, (jnp.int32(0), state))
    return state


def init_state(
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    eos_ids: Sequence[int],
    max_len: int,
    schedule: Schedule,
) -> GenState:
    """The state of `B = len(prompts)` rows with their prompts committed and nothing in the cache.

    Raises:
        InputError: a prompt is empty, holds an id outside the vocabulary, or does not fit `max_len` with its `max_tokens`.
    """
    stop_ids = [list(s.stop_token_ids) + ([] if s.ignore_eos else list(eos_ids)) for s in sampling]
    num_stop = max(1, *(len(ids) for ids in stop_ids)) if stop_ids else 1
    B = len(prompts)
    cache = init_cache(cfg, max_rows=B, max_len=max_len, page=schedule.page, dtype=jnp.dtype(schedule.cache_dtype))
    tokens = np.full((B, max_len), PAD_ID, np.int32)
    stops = np.full((B, num_stop), NO_TOKEN, np.int32)
    for b, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        check_prompt(prompt, params, cfg, max_len=max_len)
        tokens[b, : len(prompt)] = prompt
        stops[b, : len(stop_ids[b])] = stop_ids[b]
    committed = np.asarray([len(prompt) for prompt in prompts], np.int32)
    return GenState(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.zeros((B, max_len), jnp.float32),
        committed=jnp.asarray(committed),
        limit=jnp.asarray(committed + np.asarray([s.max_tokens for s in sampling], np.int32)),
        live=jnp.ones(B, bool),
        finish=jnp.full(B, RUNNING, jnp.int32),
        deterministic=jnp.asarray([s.deterministic for s in sampling]),
        stop_ids=jnp.asarray(stops),
        sampling=row_sampling(list(sampling)),
        counters=init_counters(B),
        cache=cache,
    )


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, cfg: ModelConfig, *, max_len: int) -> None:
    """Raises `InputError` if `prompt` is empty, holds ids outside the vocabulary, or does not fit with its new tokens."""
    if len(prompt) == 0:
        raise InputError("the prompt is empty: give at least one token")
    worst = max(prompt, key=lambda token: max(token - cfg.vocab_size + 1, -token))
    if not 0 <= worst < cfg.vocab_size:
        raise InputError(f"the prompt holds token id {worst}, outside the vocabulary 0 .. {cfg.vocab_size - 1}")
    if len(prompt) + sampling.max_tokens > max_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together more than the cache's "
            f"max_len of {max_len}: shorten one or raise max_len"
        )


@partial(jax.jit, static_argnames=("cfg", "schedule", "draft_fn"), donate_argnames=("state",))
def generate_state(
    params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule, draft_fn: DraftFn | None = None
) -> GenState:
    """Prefills and runs `state` until no row is live: the functional core as one program."""
    state = prefill(params, cfg, state, schedule=schedule)
    draft_fn = draft_fn or default_draft(schedule)
    max_steps = jnp.int32(state.tokens.shape[1])
    return run(params, cfg, state, draft_fn=draft_fn, schedule=schedule, max_steps=max_steps, min_live=jnp.int32(1))
