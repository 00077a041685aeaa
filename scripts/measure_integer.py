"""Cost of integer models against the same models in bfloat16, side by side, or with --loss what they lose.

    python scripts/measure_integer.py --presets tiny_python random_100m --requests 1 32 --json out/integer.json
    python scripts/measure_integer.py --processor-time
    python scripts/measure_integer.py --loss --json out/loss.json

Cost: steps of decoding, and reading a prompt, with activations of 15 and of 8 bits. The engines take turns in one process; the
fastest round of each counts, since noise only adds time. All are deterministic. On a busy machine --processor-time counts what
the process alone took.

Loss: nats a token of the shipped model on texts that it was not trained on, rows of 512 tokens, in bfloat16, in float32, with
weights in int8, and in integers with activations of 15 and of 8 bits; and how often the likeliest token is that of float32.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.checkpoint.load import cast_params
from detspec.model.to_integer import with_weights
from detspec.presets import preset
from detspec.progress import Progress
from detspec.train.corpus import read_corpus

KINDS = (None, "integer", "integer8")
LENGTH = 512  # tokens of a text whose loss is measured
HELDOUT = 25  # one file in so many is held out
SHORT = 64  # tokens of the prompts whose continuations are timed


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["tiny_python", "random_100m"], metavar="NAME", help="random weights")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32], metavar="B", help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt that is read")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--processor-time", action="store_true", help="of all threads, in the place of time that passes")
    parser.add_argument("--loss", action="store_true", help="measure what the shipped model loses, instead of cost")
    parser.add_argument("--rows", type=int, default=40, metavar="N", help="with --loss: texts of 512 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.loss:
        return print_losses(args.rows, args.json)
    rows = []
    clock = time.process_time if args.processor_time else time.perf_counter
    with Progress(0, "models") as progress:
        for name in args.presets:
            models = {kind: random_model(with_weights(preset(name), kind)) for kind in KINDS}
            for batch in args.requests:
                progress.stage(f"{name}, {batch} requests")
                rows.append({"preset": name, "requests": batch, **decoding(models, batch, args.new_tokens, args.rounds, clock)})
            progress.stage(f"{name}, a prompt of {args.prompt}")
            rows.append({"preset": name, "prompt": args.prompt, **reading(models, args.prompt, args.rounds, clock)})
    print(f"{'':14} {'':>12} {'bfloat16':>12} {'integer':>12} {'ratio':>7} {'integer8':>12} {'over 15 bits':>13}")
    for row in rows:
        what = f"{row['requests']} requests" if "requests" in row else f"prompt {row['prompt']}"
        cells = f"{row['float_ms']:9.2f} ms {row['integer_ms']:9.2f} ms {row['ratio']:7.2f} {row['integer8_ms']:9.2f} ms"
        print(f"{row['preset']:14} {what:>12} {cells} {row['over_15_bits']:13.2f}")
    write(rows, args.json)
    return 0


def write(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Writes the JSON, if it is asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows, indent=1) + "\n")


def print_losses(num_rows: int, file: Path | None) -> int:
    """Prints nats a token and how often the likeliest token is that of float32."""
    full = ds.load()
    cfg, params = cast_params(full.cfg, full.params, "float32")
    models = {
        "float32": dataclasses.replace(full, cfg=cfg, params=params),
        "bfloat16": full,
        "int8 weights": ds.load(weights="int8"),
        "integer": ds.load(weights="integer"),
        "integer8": ds.load(weights="integer8"),
    }
    assert full.tokenizer is not None
    corpus = read_corpus("python_stdlib", HELDOUT)
    ids = [token for text in corpus.heldout for token in (0, *full.tokenizer.encode(text.text, add_special_tokens=False))]
    texts = [ids[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(num_rows)]
    found = {}
    with Progress(0, "models") as progress:
        for name, model in models.items():
            progress.stage(name)
            engine = ds.Engine(model, ds.EngineConfig(max_requests=8, max_len=LENGTH + 8, method="none"))
            scored = engine.score(texts, sampling=ds.SamplingParams(logprobs=1))
            likeliest = [place[0][0] for each in scored for place in each.top_logprobs]
            found[name] = -float(np.mean([each.logprobs for each in scored])), likeliest
    rows = []
    of_bfloat16 = found["bfloat16"][0]
    for name, (nats, likeliest) in found.items():
        agree = float(np.mean(np.asarray(likeliest) == np.asarray(found["float32"][1])))
        rows.append(
            {"model": name, "tokens": len(likeliest), "nats": nats, "over_bfloat16": nats / of_bfloat16 - 1, "agree": agree}
        )
        print(
            f"{name:14} {nats:.5f} nats a token, {100 * (nats / of_bfloat16 - 1):+.3f} %   likeliest as in float32 {agree:.4f}"
        )
    write(rows, file)
    return 0


def engines(models: dict[str | None, ds.Model], batch: int, max_len: int) -> dict[str | None, ds.Engine]:
    """An engine of each model, without drafts."""
    config = ds.EngineConfig(max_requests=batch, max_len=max_len, method="none")
    return {kind: ds.Engine(model, config) for kind, model in models.items()}


def decoding(
    models: dict[str | None, ds.Model], batch: int, new_tokens: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Milliseconds of a step: long texts less short ones."""
    each = engines(models, batch, SHORT + 2 * new_tokens)
    prompts = {kind: bench_prompts(model, batch, SHORT) for kind, model in models.items()}

    def seconds(kind: str | None, tokens: int) -> float:
        sampling = ds.SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        began = clock()
        each[kind].generate(prompts[kind], sampling)
        return clock() - began

    long, short = (
        least({kind: partial(seconds, kind, tokens) for kind in KINDS}, rounds) for tokens in (2 * new_tokens, new_tokens)
    )
    return ratio({kind: (long[kind] - short[kind]) / new_tokens for kind in KINDS})


def reading(models: dict[str | None, ds.Model], length: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of reading a prompt and one step."""
    each = engines(models, 1, length + 8)
    prompts = {kind: bench_prompts(model, rounds + 1, length) for kind, model in models.items()}
    number = dict.fromkeys(KINDS, 0)

    def seconds(kind: str | None) -> float:
        number[kind] = (number[kind] + 1) % (rounds + 1)
        began = clock()
        each[kind].generate([prompts[kind][number[kind]]], ds.SamplingParams(max_tokens=1, ignore_eos=True))
        return clock() - began

    return ratio(least({kind: partial(seconds, kind) for kind in KINDS}, rounds))


def least(runs: dict[str | None, Callable[[], float]], rounds: int) -> dict[str | None, float]:
    """The fastest round of each, which take turns after a first one that compiles."""
    for run in runs.values():
        run()
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for kind, run in runs.items():
            found[kind] = min(found[kind], run())
    return found


def ratio(seconds: dict[str | None, float]) -> dict[str, Any]:
    """Milliseconds of each kind, and ratios of integers to bfloat16 and of 8 bits to 15."""
    of_float, of_15_bits, of_8_bits = (1000 * seconds[kind] for kind in KINDS)
    return {
        "float_ms": of_float,
        "integer_ms": of_15_bits,
        "integer8_ms": of_8_bits,
        "ratio": of_15_bits / of_float,
        "over_15_bits": of_8_bits / of_15_bits,
    }


if __name__ == "__main__":
    sys.exit(main())
