"""Panel 1: the time of one canonical pass by its rows."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.bench.bound import measure_machine
from detspec.cache import KVCache, init_cache
from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.model.params import Params, pass_work
from detspec.model.transformer import forward
from detspec.schedule import Numerics, Schedule
from detspec.state import Windows
from scripts.replications.llm42.traffic import Shape, model_of
from scripts.replications.turns import Prepare, time_by_turns

WINDOW = 16  # most rows of one sequence


def pass_times(*, shape: Shape, rows: Sequence[int], context: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a pass over `rows`, each after `context` positions, in turn within this process.

    Returns for each number of rows "ms"; the least times "memory_ms" and "compute_ms" of this machine; and "bound": the longer
    of the two, or "overhead" if it is less than half of the measured time.
    """
    model = model_of(shape)
    own = default_schedule(model.cfg)
    machine = measure_machine(model.cfg)
    cases: dict[str, Prepare] = {}
    budgets = {number: own.with_budget(number, min(number, WINDOW)) for number in rows}
    for number, schedule in budgets.items():
        cases[str(number)] = _prepare(model.params, model.cfg, schedule, context)
    seconds = time_by_turns(cases, repeats)
    found = []
    for number, schedule in budgets.items():
        ms = 1e3 * median(seconds[str(number)])
        work = pass_work(model.cfg, schedule, windows=schedule.budget.groups, context=context)
        memory_s, compute_s = work.least_s(machine["read_bytes_per_s"], machine["flop_per_s"])
        least = {"memory": 1e3 * memory_s, "compute": 1e3 * compute_s}
        longer = max(least, key=lambda name: least[name])
        bound = longer if least[longer] >= ms / 2 else "overhead"
        found.append({"rows": number, "ms": ms, **{f"{name}_ms": value for name, value in least.items()}, "bound": bound})
    return {"found": found, "machine": machine}


def _prepare(params: Params, cfg: ModelConfig, schedule: Schedule, context: int) -> Prepare:
    """Returns a function that times a pass; the cache goes from call to call."""
    G = schedule.budget.groups
    W = schedule.budget.window
    tokens = np.random.default_rng(G).integers(0, cfg.vocab_size, (G, W))
    windows = Windows(
        tokens=jnp.asarray(tokens, jnp.int32),
        sequence=jnp.arange(G, dtype=jnp.int32),
        start=jnp.full(G, context, jnp.int32),
        count=jnp.full(G, W, jnp.int32),
    )
    caches = [init_cache(cfg, max_requests=G, max_len=context + W, numerics=schedule.numerics)]

    def call() -> jax.Array:
        logits_f32, cache = _pass(params, cfg, windows, caches.pop(), numerics=schedule.numerics)
        caches.append(cache)
        return logits_f32

    return lambda: call


@partial(jax.jit, static_argnames=("cfg", "numerics"), donate_argnames=("cache",))
def _pass(
    params: Params, cfg: ModelConfig, windows: Windows, cache: KVCache, *, numerics: Numerics
) -> tuple[jax.Array, KVCache]:
    done = forward(params, cfg, windows, cache, numerics=numerics)
    return done.logits_f32, done.cache
