"""States before anything is generated: empty ones, and ones that hold prompts."""

from collections.abc import Sequence

import numpy as np

from detspec.cache import filled, init_cache
from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.generation.checks import check_prompt
from detspec.generation.insert import insert, pack_requests
from detspec.plain import plain_ids
from detspec.riders.counters import COUNTERS
from detspec.riders.rider import Capacity, Entry, Rider, shares_pages
from detspec.riders.riding import Riders, begin_riders
from detspec.sampler import SAMPLING
from detspec.sampling_params import SamplingParams, all_stop_ids
from detspec.schedule import Schedule
from detspec.state import PAD_ID, RUNNING, GenState
from detspec.thinking.rider import thinking_rider


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
        riders=init_riders(cfg, Capacity(max_requests, max_len, max_stop_ids, max_logit_bias, schedule)),
        cache=init_cache(cfg, max_requests=max_requests, max_len=max_len, numerics=schedule.numerics, num_pages=num_pages),
    )


def init_riders(cfg: ModelConfig, capacity: Capacity, more: Sequence[Rider] = ()) -> Riders:
    """The riders of a model's sequences, and `more`, to which nothing was brought.

    One of `more` takes the place of the model's own rider of its name. Raises `InputError` if two of `more` have one name, or
    read prompts, if one works on products and follows the text, or if a model that thinks cannot with this schedule.
    """
    own = (SAMPLING, COUNTERS, *(() if cfg.thinking is None else (thinking_rider(),)))
    names = [rider.name for rider in more]
    if twice := [name for name in names if names.count(name) > 1 or name in (SAMPLING.name, COUNTERS.name)]:
        raise InputError(f"two riders are called {twice[0]!r}: give each a name of its own")
    each = (*(rider for rider in own if rider.name not in names), *more)
    if len(readers := [rider.name for rider in each if rider.reader is not None]) > 1:
        raise InputError(f"two riders read prompts, {' and '.join(map(repr, readers))}: leave out one")
    for rider in more:
        if rider.linear is not None and (rider.changes or rider.page_key is shares_pages):
            raise InputError(
                f"rider {rider.name!r} works on products, on which keys and values depend: its state must not change with the "
                "text, so it has no follow, observe or reader, and its page_key names what a request brings"
            )
    return begin_riders(each, cfg, capacity)


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
