"""States before anything is generated: empty ones, and ones that hold prompts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from detspec.cache import filled, init_cache
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.generation.checks import check_prompt
from detspec.generation.insert import Entry, insert, pack_requests
from detspec.plain import plain_ids
from detspec.sampling_params import SamplingParams, all_stop_ids, sampling_arrays
from detspec.schedule import Schedule
from detspec.state import PAD_ID, RUNNING, GenState, SamplingArrays, init_counters
from detspec.thinking.think_prompt import init_reading


def init_state(
    cfg: ModelConfig,
    *,
    max_requests: int,
    max_len: int,
    max_stop_ids: int,
    max_logit_bias: int,
    schedule: Schedule,
    num_pages: int | None = None,
) -> GenState:
    """A state of `max_requests` sequences, none of them live.

    Each has room for `max_len` positions, `max_stop_ids` stop tokens and `max_logit_bias` biased tokens, and pages of its
    own unless `num_pages` says how many there are to hand out, see `init_cache`.

    Raises `InputError` if a window of the schedule is longer than `max_len`, or a model that thinks cannot with this schedule,
    see `init_reading`.
    """
    window = schedule.budget.window
    if window > max_len:
        raise InputError(f"Budget.window ({window}) is more than the cache's max_len ({max_len}): lower one, raise the other")
    return GenState(
        tokens=filled((max_requests, max_len), PAD_ID, np.int32),
        logprobs=filled((max_requests, max_len), 0, np.float32),
        committed=filled(max_requests, 1, np.int32),
        limit=filled(max_requests, 1, np.int32),
        live=filled(max_requests, False, bool),
        finish=filled(max_requests, RUNNING, np.int32),
        deterministic=filled(max_requests, True, bool),
        sampling=idle_sampling(max_requests, max_stop_ids=max_stop_ids, max_logit_bias=max_logit_bias),
        counters=init_counters(max_requests),
        cache=init_cache(cfg, max_requests=max_requests, max_len=max_len, numerics=schedule.numerics, num_pages=num_pages),
        reading=init_reading(cfg, max_requests=max_requests, max_len=max_len, schedule=schedule) if cfg.thinking else None,
    )


def idle_sampling(max_requests: int, *, max_stop_ids: int, max_logit_bias: int) -> SamplingArrays:
    """Sampling parameters of `max_requests` sequences that are not live, on the device, with room for so many tokens."""
    idle = sampling_arrays([SamplingParams()] * max_requests, max_stop_ids=max_stop_ids, max_logit_bias=max_logit_bias)
    return jax.tree.map(jnp.asarray, idle)


def start_state(
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    eos_ids: Sequence[int],
    max_len: int,
    schedule: Schedule,
) -> GenState:
    """The state of `B = len(prompts)` live sequences: prompts checked and committed, nothing in the cache.

    Raises `InputError` as `check_prompt` and `init_state` do.
    """
    prompts = [plain_ids(prompt) for prompt in prompts]
    for prompt, params in zip(prompts, sampling, strict=True):
        check_prompt(prompt, params, cfg, max_len=max_len)
    state = init_state(
        cfg,
        max_requests=len(prompts),
        max_len=max_len,
        max_stop_ids=max([1, *(len(all_stop_ids(params, eos_ids)) for params in sampling)]),
        max_logit_bias=max([1, *(len(params.logit_bias) for params in sampling)]),
        schedule=schedule,
    )
    entries = [Entry(place, prompt, params) for place, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))]
    state = insert(state, pack_requests(state, entries, eos_ids))
    return state.with_processing(any(params.needs_processing for params in sampling))
