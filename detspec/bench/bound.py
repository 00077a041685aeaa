"""What bounds an ordinary step: the memory, the arithmetic, or neither."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.ops.linear.xla import linear_f32


def measure_machine(cfg: ModelConfig) -> dict[str, Any]:
    """Bandwidth of reading a matrix too large for caches in a product with few rows; FLOP/s of a square product."""
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
    """What an ordinary step of `batch` rows must read and multiply, and which of the two explains its `step_ms`.

    Weights are read once a step, keys and values of the mean `context` once a row; `machine` is `measure_machine`'s.

    Neither does if the larger takes less than half of the step: then it is "overhead" (attention over gathered pages, dispatch,
    small operations). If reading would take longer than the step, the weights stay in the processor's caches: "overhead" too.
    """
    kv_itemsize = jnp.dtype(default_schedule(cfg).numerics.cache_dtype).itemsize
    lookup = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model  # an embedding that is no head is not multiplied
    num_multiplied = cfg.num_params - lookup
    num_bytes = float(num_multiplied * cfg.jax_dtype.itemsize)
    num_bytes += batch * context * 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * kv_itemsize
    flop = batch * (2 * num_multiplied + 4 * context * cfg.num_layers * cfg.num_heads * cfg.head_dim)
    floors = {"memory": 1e3 * num_bytes / machine["read_bytes_per_s"], "compute": 1e3 * flop / machine["flop_per_s"]}
    possible = {key: value for key, value in floors.items() if value <= 1.1 * step_ms}
    name = max(possible, key=lambda key: possible[key], default="overhead")
    return {
        "bytes": num_bytes,
        "flop": flop,
        "step_ms": step_ms,
        **{f"{key}_ms": value for key, value in floors.items()},
        "name": name if possible.get(name, 0.0) >= step_ms / 2 else "overhead",
    }


def _best_s(run: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Least seconds of five calls after one that compiles: noise only ever adds."""
    jax.block_until_ready(run(*args))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - began)
    return min(seconds)
