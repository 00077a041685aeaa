#!/usr/bin/env python
"""Parts of the time of a decoding step on the CPU, and the least time that memory and arithmetic would need.

jax's profiler names every operation that XLA runs. The compiled program says what it belongs to in a step: products with
weights, attention, moves (keys and values into pages, embeddings out of the table), sampling, and the rest of the layers. What
no operation accounts for is the host's: XLA's dispatch, the loop, and Python between segments. Operations that run at the same
time all count, so parts can add up to more than the step. A sample is the trace of long texts less that of short ones.

    python scripts/step_budget.py --presets tiny_python random_100m --requests 1 8 32 --json out/budget.json
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
from tqdm import tqdm

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.bench.bound import bound, measure_machine
from detspec.engine.compiled import PROGRAMS
from detspec.engine.programs import run_segment
from detspec.presets import preset

SHORT, LONG = 16, 80  # new tokens of the two texts whose traces are compared
PROMPT_LEN = 64
PARTS = ("products", "attention", "moves", "sampling", "rest of layers", "host")
CALLS = {
    "detspec_linear": "products",
    "detspec_experts": "products",
    "detspec_attention": "attention",
    "detspec_append": "moves",
    "detspec_take": "moves",
}

OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (?:\([^=]*\)|\S+) ([\w-]+)\(")  # its name and its kind
HOLDERS = ("while", "conditional", "call")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["tiny_python", "random_100m"], metavar="NAME", help="random weights")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args(argv)
    if jax.default_backend() != "cpu":
        parser.error(f"the trace of XLA:CPU is read, and this process runs on {jax.devices()[0].device_kind}")
    if args.rounds < 1 or min(args.requests) < 1:
        parser.error(f"--rounds and --requests must be at least 1, got {args.rounds} and {min(args.requests)}")
    rows = []
    cases = [(name, batch) for name in args.presets for batch in args.requests]
    for name, batch in tqdm(cases, unit="case", disable=None):
        rows.append(measure(name, batch, args.rounds))
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"fingerprint": ds.fingerprint(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """The parts of a deterministic step without a draft, ms; medians."""
    model = random_model(preset(name))
    # Programs from files have no text, so nothing is kept.
    config = ds.EngineConfig(max_requests=batch, max_len=256, method="none", prefix_sharing=False, compile_cache=False)
    engine = ds.Engine(model, config)
    engine.prepare(batch, ds.Needs.of([ds.SamplingParams()]))
    part_of = parts_of_operations()
    prompts = bench_prompts(model, batch, PROMPT_LEN)
    generate(engine, prompts, LONG)
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}
    for _ in range(rounds):
        short, short_s = traced(engine, prompts, SHORT)
        long, long_s = traced(engine, prompts, LONG)
        steps = LONG - SHORT
        parts: Counter[str] = Counter()
        for operation in long:
            if operation in part_of:
                parts[part_of[operation]] += 1e-3 * (long[operation] - short[operation]) / steps
        step_ms = 1e3 * (long_s - short_s) / steps
        parts["host"] = max(step_ms - sum(parts.values()), 0.0)
        for part in PARTS:
            found[part].append(parts[part])
        found["step"].append(step_ms)
    parts_ms = {part: median(samples) for part, samples in found.items()}
    machine = measure_machine(model.cfg)
    context = PROMPT_LEN + (SHORT + LONG) / 2
    limits = bound(model.cfg, machine, batch=batch, context=context, step_ms=parts_ms["step"])
    return {"model": name, "requests": batch, **parts_ms, "machine": machine, "bound": limits}


def generate(engine: ds.Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds of whole requests."""
    sampling = ds.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, sampling)
    return time.perf_counter() - began


def traced(engine: ds.Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[Counter[str], float]:
    """Microseconds of each operation under jax's profiler, and the seconds of the same requests without it."""
    seconds = generate(engine, prompts, new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            generate(engine, prompts, new_tokens)
        [path] = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spent: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X":
            spent[event["name"]] += event.get("dur", 0)
    return spent, seconds


def parts_of_operations() -> dict[str, str]:
    """The part of a step that each operation of the compiled segments belongs to; what holds other operations has none."""
    lines = [line for program in PROGRAMS.made_from(run_segment) for line in program.as_text().splitlines()]
    found = [(OPERATION.match(line), line) for line in lines]
    return {match[1]: part_of(line) for match, line in found if match and match[2] not in HOLDERS}


def part_of(line: str) -> str:
    """The part that one line of a compiled program belongs to."""
    if called := re.search(r'custom_call_target="(detspec_[a-z]+)', line):
        return CALLS.get(called[1], "rest of layers")
    return "sampling" if "/sample/" in line else "rest of layers"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, ms."""
    heads = ["model", "requests", "step", *PARTS, "memory needs", "arithmetic needs"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for row in rows:
        limits = row["bound"]
        numbers = [row["step"], *(row[part] for part in PARTS), limits["memory_ms"], limits["compute_ms"]]
        lines.append(f"| {row['model']} | {row['requests']} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
