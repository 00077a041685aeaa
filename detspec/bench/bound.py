"""What bounds an ordinary step: the memory, the arithmetic, or neither."""

import os
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.model.work import pass_work
from detspec.ops.linear.xla import linear_f32


def measure_machine(cfg: ModelConfig) -> dict[str, Any]:
    """Measures memory bandwidth and arithmetic speed in the dtype of `cfg`.

    Bandwidth is that of a product of few rows with a matrix that exceeds the caches; FLOP/s are those of a square product.
    """
    on_cpu = jax.default_backend() == "cpu"
    big = jnp.ones((((64 if on_cpu else 1024) << 20) // 1024, 1024), cfg.jax_dtype)
    few = jnp.ones((4, 1024), cfg.jax_dtype)
    side = 2048 if on_cpu else 8192
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.float32).astype(cfg.jax_dtype)
    read_s = _best_s(jax.jit(linear_f32), few, big)
    product_s = _best_s(jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32)), square, square)
    return {
        "read_bytes_per_s": big.nbytes / read_s,
        "flop_per_s": 2 * side**3 / product_s,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def bound(cfg: ModelConfig, machine: dict[str, Any], *, batch: int, context: float, step_ms: float) -> dict[str, Any]:
    """Says whether memory or arithmetic explains the time of an ordinary step.

    Neither does if the longer of the two takes less than half of the step. Then "overhead" does: attention over gathered pages,
    dispatch, small operations. If reading alone would take longer than the step, the weights stay in the processor's caches,
    and the answer is "overhead" too.

    The step has `batch` rows, which attend to `context` positions on average, and was measured to take `step_ms` on `machine`,
    which `measure_machine` gave. Returns its `bytes` and `flop`, `step_ms`, the least times `memory_ms` and `compute_ms`, and
    `name`: "memory", "compute" or "overhead".
    """
    work = pass_work(cfg, default_schedule(cfg).fast(batch), windows=batch, context=round(context))
    floors = {"memory": 1e3 * work.bytes / machine["read_bytes_per_s"], "compute": 1e3 * work.flop / machine["flop_per_s"]}
    possible = {key: value for key, value in floors.items() if value <= 1.1 * step_ms}
    name = max(possible, key=lambda key: possible[key], default="overhead")
    return {
        "bytes": work.bytes,
        "flop": work.flop,
        "step_ms": step_ms,
        **{f"{key}_ms": value for key, value in floors.items()},
        "name": name if possible.get(name, 0.0) >= step_ms / 2 else "overhead",
    }


def _best_s(run: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Least seconds of six calls, of which the first compiles; noise only adds time."""
    return min(timeit.repeat(lambda: jax.block_until_ready(run(*args)), number=1, repeat=6))
