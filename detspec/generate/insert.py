"""States without rows, and putting requests into rows."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import init_cache
from detspec.config import ModelConfig, Schedule
from detspec.errors import InputError
from detspec.sampling import SamplingParams, row_sampling
from detspec.state import NO_TOKEN, PAD_ID, RUNNING, GenState, RowSampling, init_counters


def init_state(cfg: ModelConfig, *, max_rows: int, max_len: int, max_stop_ids: int, schedule: Schedule) -> GenState:
    """A state of `max_rows` rows, none of them live, with room for `max_len` positions and `max_stop_ids` stop tokens each.

    Raises:
        InputError: a window of the schedule is longer than `max_len`.
    """
    if schedule.window > max_len:
        raise InputError(
            f"Schedule.window ({schedule.window}) is larger than the cache's max_len ({max_len}): lower one, raise the other"
        )
    dtype = jnp.dtype(schedule.cache_dtype)
    return GenState(
        tokens=jnp.full((max_rows, max_len), PAD_ID, jnp.int32),
        logprobs=jnp.zeros((max_rows, max_len), jnp.float32),
        committed=jnp.ones(max_rows, jnp.int32),
        limit=jnp.ones(max_rows, jnp.int32),
        live=jnp.zeros(max_rows, bool),
        finish=jnp.full(max_rows, RUNNING, jnp.int32),
        deterministic=jnp.ones(max_rows, bool),
        stop_ids=jnp.full((max_rows, max_stop_ids), NO_TOKEN, jnp.int32),
        sampling=row_sampling([SamplingParams()] * max_rows),
        counters=init_counters(max_rows),
        cache=init_cache(cfg, max_rows=max_rows, max_len=max_len, page=schedule.page, dtype=dtype),
    )


def start_state(
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    eos_ids: Sequence[int],
    max_len: int,
    schedule: Schedule,
) -> GenState:
    """The state of `B = len(prompts)` live rows: prompts checked and committed, nothing in the cache."""
    for prompt, params in zip(prompts, sampling, strict=True):
        check_prompt(prompt, params, cfg, max_len=max_len)
    max_stop_ids = max([1, *(len(all_stop_ids(params, eos_ids)) for params in sampling)])
    state = init_state(cfg, max_rows=len(prompts), max_len=max_len, max_stop_ids=max_stop_ids, schedule=schedule)
    return insert(state, range(len(prompts)), prompts, sampling, eos_ids)


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, cfg: ModelConfig, *, max_len: int) -> None:
    """Raises `InputError` if `prompt` is empty, holds ids outside the vocabulary, or does not fit with its new tokens."""
    if len(prompt) == 0:
        raise InputError("the prompt is empty: give at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < cfg.vocab_size:
            raise InputError(f"the prompt holds token id {token!r}; accepted are integers in 0 .. {cfg.vocab_size - 1}")
    if len(prompt) + sampling.max_tokens > max_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together more than the cache's "
            f"max_len of {max_len}: shorten one or raise max_len"
        )


def all_stop_ids(sampling: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a request: its own, and the model's unless it ignores them."""
    return tuple(dict.fromkeys((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids))))


def insert(
    state: GenState,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    eos_ids: Sequence[int],
) -> GenState:
    """Puts checked requests into `rows`: prompts committed, nothing in the cache, counters at zero."""
    max_rows, max_len = state.tokens.shape
    tokens = np.full((max_rows, max_len), PAD_ID, np.int32)
    stop_ids = np.full(state.stop_ids.shape, NO_TOKEN, np.int32)
    committed = np.ones(max_rows, np.int32)
    params = [SamplingParams()] * max_rows
    for row, prompt, requested in zip(rows, prompts, sampling, strict=True):
        stops = all_stop_ids(requested, eos_ids)
        if len(stops) > stop_ids.shape[1]:
            raise InputError(f"a request has {len(stops)} stop tokens, more than the {stop_ids.shape[1]} there is room for")
        tokens[row, : len(prompt)] = prompt
        stop_ids[row, : len(stops)] = stops
        committed[row] = len(prompt)
        params[row] = requested
    chosen = np.zeros(max_rows, bool)
    chosen[list(rows)] = True
    limit = committed + np.asarray([p.max_tokens for p in params], np.int32)
    deterministic = np.asarray([p.deterministic for p in params])
    return _put_requests(state, chosen, tokens, committed, limit, deterministic, stop_ids, row_sampling(params))


@partial(jax.jit, donate_argnames=("state",))
def _put_requests(
    state: GenState,
    chosen: jax.Array,  # [B] bool
    tokens: jax.Array,
    committed: jax.Array,
    limit: jax.Array,
    deterministic: jax.Array,
    stop_ids: jax.Array,
    sampling: RowSampling,
) -> GenState:
    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    return state.replace(
        tokens=put(state.tokens, tokens),
        logprobs=put(state.logprobs, jnp.zeros_like(state.logprobs)),
        committed=put(state.committed, committed),
        limit=put(state.limit, limit),
        live=state.live | chosen,
        finish=put(state.finish, jnp.full_like(state.finish, RUNNING)),
        deterministic=put(state.deterministic, deterministic),
        stop_ids=put(state.stop_ids, stop_ids),
        sampling=jax.tree.map(put, state.sampling, sampling),
        counters=jax.tree.map(put, state.counters, init_counters(tokens.shape[0])),
        cache=state.cache.replace(length=put(state.cache.length, jnp.zeros_like(state.cache.length))),
    )


def take_rows(state: GenState, rows: jax.Array) -> GenState:
    """The state of `rows [b]` alone, over the same page pools."""
    pools = state.cache
    small = state.replace(cache=pools.replace(k=(), v=()))
    small = jax.tree.map(lambda x: x[rows], small)
    return small.replace(cache=small.cache.replace(k=pools.k, v=pools.v))


def put_rows(state: GenState, rows: jax.Array, part: GenState) -> GenState:
    """`state` with `rows [b]`, all different, replaced by `part`'s, and `part`'s page pools."""
    pools = part.cache
    old, new = state.replace(cache=state.cache.replace(k=(), v=())), part.replace(cache=pools.replace(k=(), v=()))
    joined = jax.tree.map(lambda x, y: x.at[rows].set(y), old, new)
    return joined.replace(cache=joined.cache.replace(k=pools.k, v=pools.v))
