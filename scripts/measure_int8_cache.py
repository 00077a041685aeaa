"""Keys and values in int8 next to the model's own dtype: loss on held-out files, bytes, and steps at long contexts.

    python scripts/measure_int8_cache.py --json out/int8_cache.json

A step is one canonical pass of one row for each request, logits included, with random numbers in all pages of the context.
Both kinds of cache take turns in one process; the figures are medians of processor time, and of the ratios within rounds. The
loss is that of `measure_int8.py`.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure_int8 import heldout_rows, nats_per_token

import detspec as ds
from detspec.cache import KVCache, cache_bytes, init_cache
from detspec.checkpoint.folder import SHIPPED_MODELS
from detspec.checkpoint.load import load
from detspec.compile_cache import enable_jax_cache
from detspec.model.params import Params, init_params
from detspec.model.transformer import forward
from detspec.presets import preset
from detspec.state import Windows

STEPS = 4  # of a sample


def main() -> int:
    """Prints the losses, and a line for each model, number of requests and context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout-tokens", type=int, default=16384, help="held-out tokens; 0 leaves the loss out")
    parser.add_argument("--models", nargs="*", default=["tiny_python", "random_100m"], help="shipped models and presets")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="requests in flight")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048], help="positions that each request attends to")
    parser.add_argument("--rounds", type=int, default=15, help="rounds")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    args = parser.parse_args()
    enable_jax_cache()
    result: dict[str, Any] = {"fingerprint": ds.fingerprint(), "loss": {}, "steps": []}
    if args.heldout_tokens:
        result["loss"] = losses(args.heldout_tokens)
    for name in args.models:
        for number in args.requests:
            result["steps"] += [steps(name, number, context, args.rounds) for context in args.contexts]
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def losses(num_tokens: int) -> dict[str, float]:
    """Nats per held-out token of the shipped model with each kind of cache."""
    model = load()
    rows = heldout_rows(num_tokens)
    schedule = ds.default_schedule(model.cfg)
    found = {kind: nats_per_token(model, rows, schedule.with_numerics(cache_dtype=kind)) for kind in (model.cfg.dtype, "int8")}
    first, second = found.values()
    print(f"{found}, int8 over {model.cfg.dtype}: {second / first:.5f}, {sum(map(len, rows)) - len(rows):,} tokens", flush=True)
    return found


def steps(name: str, number: int, context: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of processor time of a step with each kind of cache, by turns."""
    shipped = name in SHIPPED_MODELS
    cfg = load(name).cfg if shipped else preset(name)
    cfg = dataclasses.replace(cfg, max_position=max(cfg.max_position, context))
    params = load(name).params if shipped else init_params(cfg, jax.random.key(0))
    windows = Windows(
        tokens=jnp.ones((number, 1), jnp.int32),
        sequence=jnp.arange(number, dtype=jnp.int32),
        start=jnp.full(number, context - 1, jnp.int32),
        count=jnp.ones(number, jnp.int32),
    )
    runs, num_bytes = [], {}
    for kind in (cfg.dtype, "int8"):
        numerics = ds.default_schedule(cfg).with_numerics(cache_dtype=kind).numerics
        room = {"max_requests": number, "max_len": context, "numerics": numerics}
        num_bytes[kind] = cache_bytes(cfg, **room)

        def step(params: Params, cache: KVCache, numerics: Any = numerics) -> tuple[jax.Array, KVCache]:
            found = forward(params, cfg, windows, cache, numerics=numerics)
            return found.logits_f32, found.cache

        runs.append((jax.jit(step, donate_argnums=1), [filled(init_cache(cfg, **room))]))
    samples: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            run, held = runs[which]
            began = time.process_time()
            for _ in range(STEPS):
                logits, cache = run(params, held.pop())
                held.append(cache)
            logits.block_until_ready()
            if turn:  # the first round compiles
                samples[which].append(1e3 * (time.process_time() - began) / STEPS)
    ratio = median((np.asarray(samples[1]) / np.asarray(samples[0])).tolist())
    first, second = (median(each) for each in samples)
    megabytes = ", ".join(f"{kind} {each / 1e6:.1f} MB" for kind, each in num_bytes.items())
    print(
        f"{name:>12} {number:3} requests, context {context:5}: {cfg.dtype} {first:8.2f} ms, int8 {second:8.2f} ms of processor "
        f"time, int8 over {cfg.dtype} {ratio:.2f}; {megabytes}",
        flush=True,
    )
    row = {"model": name, "requests": number, "context": context, "dtype": cfg.dtype}
    return {**row, "processor_ms": samples, "ratio": ratio, "cache_bytes": num_bytes}


def filled(cache: KVCache) -> KVCache:
    """`cache` with random numbers in all slots."""
    rng = np.random.default_rng(0)

    def random(pool: jax.Array) -> jax.Array:
        if pool.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, pool.shape, np.int8))
        return jnp.asarray(rng.random(pool.shape, np.float32) / 32).astype(pool.dtype)

    return cache.replace(pools=jax.tree.map(random, cache.pools))


if __name__ == "__main__":
    raise SystemExit(main())
