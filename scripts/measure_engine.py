"""Measures how long the device waits for the host, and whether memory grows over many requests.

    python scripts/measure_engine.py --requests 10000 --max-requests 32

Runs short requests of mixed lengths through one engine, which replaces finished requests all the time. After every tenth of the
requests it prints tokens per second, the share of time in which the device waited for the host between two segments, the pages
in use, the resident memory of the process, and its growth since the first tenth.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import detspec as ds
from detspec.compile_cache import enable_jax_cache

BYTES_A_PAGE = 4096


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests")
    parser.add_argument("--max-requests", type=int, default=32, help="requests in flight")
    parser.add_argument(
        "--new-tokens", type=int, default=48, help="most new tokens; lengths are uniform from an eighth of it on"
    )
    parser.add_argument("--ordinary", action="store_true", help="make all requests ordinary")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    enable_jax_cache()
    engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=args.max_requests, max_len=512))
    engine.prepare(needs=ds.Needs(deterministic=not args.ordinary, processing=False))
    print(f"{'requests':>8} {'tok/s':>8} {'idle':>7} {'pages':>6} {'memory MB':>10} {'growth MB':>10}")
    rows = [show(row) for row in measure(engine, args.requests, args.new_tokens, deterministic=not args.ordinary)]
    if args.json:
        args.json.write_text(json.dumps({"fingerprint": ds.fingerprint(), "rows": rows}, indent=2) + "\n")
    return 0


def show(row: dict[str, float]) -> dict[str, float]:
    """Prints a row of the table and returns it."""
    print(
        f"{row['requests']:8} {row['tok_per_s']:8.0f} {row['idle']:7.1%} {row['pages']:6} {row['memory_mb']:10.1f} "
        f"{row['growth_mb']:10.1f}",
        flush=True,
    )
    return row


def measure(engine: ds.Engine, number: int, new_tokens: int, *, deterministic: bool) -> Iterator[dict[str, float]]:
    """Yields a row of the table about each tenth of the requests."""
    tenth = max(1, number // 10)
    done = tokens = 0
    base = None
    busy_s = engine.busy_s
    idle_s = engine.idle_s
    began = time.perf_counter()
    requests = some_requests(engine, number, new_tokens, deterministic=deterministic)
    for completion in engine.run(requests):
        done, tokens = done + 1, tokens + len(completion.token_ids)
        if done % tenth:
            continue
        now = time.perf_counter()
        memory_mb = resident_mb()
        base = base or memory_mb
        busy = engine.busy_s - busy_s
        idle = engine.idle_s - idle_s
        yield {
            "requests": done,
            "tok_per_s": tokens / (now - began),
            "idle": idle / (busy + idle),
            "pages": engine.num_pages_held,
            "memory_mb": memory_mb,
            "growth_mb": memory_mb - base,
        }
        busy_s = engine.busy_s
        idle_s = engine.idle_s
        began = now
        tokens = 0


def some_requests(engine: ds.Engine, number: int, new_tokens: int, *, deterministic: bool) -> Iterator[ds.Request]:
    """Lazily yields requests with prompts of 4 to 99 tokens; half of them are sampled."""
    rng = np.random.default_rng(0)
    vocab_size = engine.model.cfg.vocab_size
    for i in range(number):
        prompt = rng.integers(0, vocab_size, int(rng.integers(4, 100))).tolist()
        sampling = ds.SamplingParams(
            max_tokens=int(rng.integers(max(1, new_tokens // 8), new_tokens + 1)),
            temperature=0.8 * (i % 2),
            seed=i,
            ignore_eos=True,
            deterministic=deterministic,
        )
        yield engine.request(prompt, sampling, id=str(i))


def resident_mb() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * BYTES_A_PAGE / 1e6


if __name__ == "__main__":
    sys.exit(main())
