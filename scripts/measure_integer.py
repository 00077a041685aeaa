"""Cost of integer models against the same models in bfloat16, side by side: steps of decoding, and reading a prompt.

    python scripts/measure_integer.py --presets tiny_python random_100m --requests 1 32 --json out/integer.json

Both engines take turns in one process; the fastest round of each counts, since noise only adds time. Both are deterministic.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.model.to_integer import with_weights
from detspec.presets import preset
from detspec.progress import Progress

KINDS = (None, "integer")
SHORT = 64  # tokens of the prompts whose continuations are timed


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["tiny_python", "random_100m"], metavar="NAME", help="random weights")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32], metavar="B", help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt that is read")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = []
    with Progress(0, "models") as progress:
        for name in args.presets:
            models = {kind: random_model(with_weights(preset(name), kind)) for kind in KINDS}
            for batch in args.requests:
                progress.stage(f"{name}, {batch} requests")
                rows.append({"preset": name, "requests": batch, **decoding(models, batch, args.new_tokens, args.rounds)})
            progress.stage(f"{name}, a prompt of {args.prompt}")
            rows.append({"preset": name, "prompt": args.prompt, **reading(models, args.prompt, args.rounds)})
    print(f"{'':14} {'':>12} {'bfloat16':>12} {'integer':>12} {'ratio':>7}")
    for row in rows:
        what = f"{row['requests']} requests" if "requests" in row else f"prompt {row['prompt']}"
        print(f"{row['preset']:14} {what:>12} {row['float_ms']:9.2f} ms {row['integer_ms']:9.2f} ms {row['ratio']:7.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def engines(models: dict[str | None, ds.Model], batch: int, max_len: int) -> dict[str | None, ds.Engine]:
    """An engine of each model, without drafts."""
    config = ds.EngineConfig(max_requests=batch, max_len=max_len, method="none")
    return {kind: ds.Engine(model, config) for kind, model in models.items()}


def decoding(models: dict[str | None, ds.Model], batch: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step: long texts less short ones."""
    each = engines(models, batch, SHORT + 2 * new_tokens)
    prompts = {kind: bench_prompts(model, batch, SHORT) for kind, model in models.items()}

    def seconds(kind: str | None, tokens: int) -> float:
        sampling = ds.SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        began = time.perf_counter()
        each[kind].generate(prompts[kind], sampling)
        return time.perf_counter() - began

    return ratio(
        {kind: _least(lambda kind=kind: seconds(kind, 2 * new_tokens) - seconds(kind, new_tokens)) for kind in KINDS},
        rounds,
        new_tokens,
    )


def reading(models: dict[str | None, ds.Model], length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of reading a prompt and one step."""
    each = engines(models, 1, length + 8)
    prompts = {kind: bench_prompts(model, rounds + 1, length) for kind, model in models.items()}
    number = dict.fromkeys(KINDS, 0)

    def seconds(kind: str | None) -> float:
        number[kind] = (number[kind] + 1) % (rounds + 1)
        began = time.perf_counter()
        each[kind].generate([prompts[kind][number[kind]]], ds.SamplingParams(max_tokens=1, ignore_eos=True))
        return time.perf_counter() - began

    return ratio({kind: _least(lambda kind=kind: seconds(kind)) for kind in KINDS}, rounds, 1)


def _least(run: Any) -> Any:
    return run


def ratio(runs: dict[str | None, Any], rounds: int, per: int) -> dict[str, Any]:
    """The fastest round of each, which take turns after a first one."""
    for run in runs.values():
        run()
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for kind, run in runs.items():
            least[kind] = min(least[kind], run())
    of_float, of_integer = (1000 * least[kind] / per for kind in KINDS)
    return {"float_ms": of_float, "integer_ms": of_integer, "ratio": of_integer / of_float}


if __name__ == "__main__":
    sys.exit(main())
