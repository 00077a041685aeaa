#!/usr/bin/env python
"""Measures a running server as `vllm bench serve` does, with its options and the names of its results.

    detspec serve --port 8000 &
    python scripts/bench_serve.py --port 8000 --num-prompts 200 --request-rate 8 --deterministic-ratio 0.1

`--deterministic-ratio` is LLM-42's: that share of the requests is sent with `"is_deterministic": true`, the others with false.
Prompts are made-up token ids of random lengths. Arrivals are a Poisson process (`--burstiness 1`).
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.serving.load import METRICS, marked, send_all, summary


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", default="/v1/completions", help="path of the calls")
    add("--model", default="tiny_python", help="the model's name in the calls")
    add("--vocab-size", type=int, default=2048, help="made-up prompts hold ids below it")
    add("--num-prompts", type=int, default=1000)
    add("--random-input-len", type=int, default=128, help="tokens of a prompt")
    add("--random-output-len", type=int, default=64, help="new tokens")
    add("--random-range-ratio", type=float, default=0.0, help="lengths differ from these by up to this share, 0 .. 1")
    add("--request-rate", type=float, default=float("inf"), help="requests a second; inf sends all at once")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less comes in bursts")
    add("--max-concurrency", type=int, help="most calls in flight")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits of a good request: ttft:200 tpot:50 e2el:2000")
    add("--percentile-metrics", default=",".join(METRICS), help="of ttft, tpot, itl, e2el, with commas")
    add("--metric-percentiles", default="50,99")
    add("--deterministic-ratio", type=float, default=1.0, help="share of requests that are deterministic")
    add("--deterministic-seed", type=int, default=42)
    add("--save-result", action="store_true", help="also write the results as JSON")
    add("--result-dir", default=".", help="where to")
    add("--result-filename", default="bench_serve.json", help="and under which name")
    args = parser.parse_args(argv)
    bodies = marked(random_bodies(args), args.deterministic_ratio, args.deterministic_seed)
    answers, seconds = asyncio.run(
        send_all(
            bodies,
            (args.host, args.port, args.endpoint),
            rate=args.request_rate,
            burstiness=args.burstiness,
            most_at_once=args.max_concurrency,
            seed=args.seed,
        )
    )
    goodput = {name: float(limit) for name, _, limit in (entry.partition(":") for entry in args.goodput)}
    percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    found = summary(answers, seconds, percentiles=percentiles, goodput=goodput)
    found["total_input_tokens"] = sum(len(body["prompt"]) for body in bodies)
    metrics = args.percentile_metrics.split(",")
    for name, value in found.items():
        if not name.endswith("_ms") or name.split("_")[-2] in metrics:
            print(f"{name:24} {value:12.2f}")
    for error in sorted({answer.error for answer in answers if answer.error}):
        print(f"failed: {error}", file=sys.stderr)
    if args.save_result:
        path = Path(args.result_dir, args.result_filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if found["failed"] else 0


def random_bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Completions of made-up prompts."""
    rng = np.random.default_rng(args.seed)

    def length(middle: int) -> int:
        low, high = (round(middle * (1 + sign * args.random_range_ratio)) for sign in (-1, 1))
        return int(rng.integers(max(1, low), high + 1))

    return [
        {
            "model": args.model,
            "prompt": rng.integers(0, args.vocab_size, length(args.random_input_len)).tolist(),
            "max_tokens": length(args.random_output_len),
            "temperature": args.temperature,
            "seed": place,
            "ignore_eos": True,
        }
        for place in range(args.num_prompts)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
