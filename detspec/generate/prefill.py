"""Catching up: writes the keys and values of all committed tokens but the last, through the canonical pass.

The last committed token is left to the next window, whose first target is the next token: a prompt of one token needs no
prefill, and a preempted row is replayed by the same function.
"""

import jax
import jax.numpy as jnp

from detspec.cache import KVCache
from detspec.config import ModelConfig, Schedule
from detspec.generate.passes import run_passes
from detspec.model.params import Params
from detspec.model.transformer import forward
from detspec.state import GenState, Windows


def prefill(params: Params, cfg: ModelConfig, state: GenState, *, schedule: Schedule) -> GenState:
    """Brings every live row to `cache.length == committed - 1`; the missing stretches of all rows share the passes."""
    length = state.cache.length
    end = jnp.where(state.live, jnp.maximum(length, state.committed - 1), length)

    def run_pass(windows: Windows, cache: KVCache) -> KVCache:
        _, cache = forward(params, cfg, windows, cache, schedule=schedule)
        return cache

    with jax.named_scope("prefill"):
        cache = run_passes(run_pass, state.cache, state.tokens, length, end, schedule=schedule)
    return state.replace(cache=cache.replace(length=end))
