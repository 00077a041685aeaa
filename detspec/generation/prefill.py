"""Catching up: writes the keys and values of all committed tokens but the last, through the canonical pass.

The last committed token is left to the next window, whose first target is the next token: a prompt of one token needs no
prefill, and a preempted request catches up by the same function. Two sequences, the second of one token:

    tokens     5 7 9 3 8    committed 5    length before 0    read 5 7 9 3    length after 4
               2            committed 1    length before 0    nothing to read  length after 0
"""

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.passes import Spans, missing, run_passes
from detspec.schedule import Schedule
from detspec.state import GenState, Windows


def read_by_riders(
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    *,
    schedule: Schedule,
    new: jax.Array | None = None,
    max_passes: jax.Array | None = None,
) -> GenState:
    """Lets the rider that reads prompts itself do so, in `max_passes` passes at most.

    `new [B]` bool are the sequences that were just put in, all live ones if None.
    """
    reader = state.riders.reader
    if reader is None:
        return state
    new = state.live if new is None else new
    return reader.read(params, cfg, state, new, schedule=schedule, max_passes=max_passes)


def prefill(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Brings every live sequence to `cache.length == committed - 1`."""
    lacking = missing(state, schedule)
    cache = fill(params, cfg, state, lacking, schedule=schedule)
    return state.replace(cache=cache.replace(length=jnp.maximum(state.cache.length, lacking.end)))


def fill(params: Params, cfg: ModelConfig, state: GenState, given: Spans, *, schedule: Schedule) -> KVCache:
    """The cache with keys and values of the spans `given`."""

    def run_pass(windows: Windows, cache: KVCache) -> KVCache:
        _, cache, _ = forward(params, cfg, windows, cache, numerics=schedule.numerics, riding=state.riding(windows))
        return cache

    with jax.named_scope("prefill"):
        return run_passes(run_pass, state.cache, state.tokens, given, schedule=schedule)
