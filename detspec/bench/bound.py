"""Bounds of an ordinary step: the memory, the arithmetic, or neither."""

import os
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.model.params import pass_work
from detspec.native.library import kernel, multiply_adds_of_instruction

CPU_BYTES = 512 << 20  # read to measure bandwidth: more than caches hold
CEILING_ITEMS = 64  # as in `native/ceiling.c`
CEILING_SUMS = 12  # and its PEAK_SUMS
CEILING_MULTIPLY_ADDS = 1_600_000  # in each item


def measure_machine(cfg: ModelConfig) -> dict[str, Any]:
    """Measures memory bandwidth and arithmetic speed in the dtype of `cfg`, by other code than generation runs.

    On a CPU with kernels, bandwidth is that of all threads reading an array that exceeds the caches, and FLOP/s are those of
    multiply-adds in registers. Elsewhere they are those of XLA's maximum of an array, and of a square product.
    """
    if default_schedule(cfg).numerics.implementation == "cpu":
        read_s, flop_per_s = _ceilings_of_cpu(cfg)
        read_bytes = CPU_BYTES
    else:
        on_cpu = jax.default_backend() == "cpu"
        big = jnp.ones((CPU_BYTES if on_cpu else 1 << 30) // 4, jnp.float32)
        side = 2048 if on_cpu else 8192
        square = jax.random.normal(jax.random.key(0), (side, side), jnp.float32).astype(cfg.jax_dtype)
        read_s = _best_s(jax.jit(jnp.max), big)
        read_bytes = big.nbytes
        product_s = _best_s(jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32)), square, square)
        flop_per_s = 2 * side**3 / product_s
    return {
        "read_bytes_per_s": read_bytes / read_s,
        "flop_per_s": flop_per_s,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def _ceilings_of_cpu(cfg: ModelConfig) -> tuple[float, float]:
    """Seconds to read CPU_BYTES, and FLOP/s."""
    call = kernel("detspec_ceiling", cfg.jax_dtype, jax.ShapeDtypeStruct((CEILING_ITEMS,), jnp.float32))
    big = jnp.ones(CPU_BYTES, jnp.uint8)
    read_s = _best_s(jax.jit(lambda x: call(x, repeats=np.int32(0))), big)
    of_instruction = multiply_adds_of_instruction(cfg.jax_dtype)
    repeats = CEILING_MULTIPLY_ADDS // of_instruction
    compute_s = _best_s(jax.jit(lambda x: call(x, repeats=np.int32(repeats))), big[:CEILING_ITEMS])
    return read_s, CEILING_ITEMS * CEILING_SUMS * repeats * 2 * of_instruction / compute_s


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
    memory_s, compute_s = work.least_s(machine["read_bytes_per_s"], machine["flop_per_s"])
    least_ms = {"memory": 1e3 * memory_s, "compute": 1e3 * compute_s}
    explains = {name: ms for name, ms in least_ms.items() if step_ms / 2 <= ms <= 1.1 * step_ms}
    return {
        "bytes": work.bytes,
        "flop": work.flop,
        "step_ms": step_ms,
        **{f"{name}_ms": ms for name, ms in least_ms.items()},
        "name": max(explains, key=lambda name: explains[name], default="overhead"),
    }


def _best_s(run: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Least seconds of six calls, of which the first compiles; noise only adds time."""
    return min(timeit.repeat(lambda: jax.block_until_ready(run(*args)), number=1, repeat=6))
