#!/usr/bin/env python
"""Parts of the time of a decoding step and of a prefill on the CPU, and the least time that memory and arithmetic would need.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
from tqdm import tqdm

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.bench.bound import bound, measure_machine
from detspec.engine.compiled import PROGRAMS
from detspec.engine.programs import prefill_sequences, run_segment
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
    "detspec_draw": "sampling",
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
    cases = [(name, batch) for name in args.presets for batch in args.requests]
    rows = [row for name, batch in tqdm(cases, unit="case", disable=None) for row in measure(name, batch, args.rounds)]
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"fingerprint": ds.fingerprint(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(name: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """The parts of a deterministic step without a draft and of a prefill, ms; medians."""
    model = random_model(preset(name))
    # Programs from files have no text, so nothing is kept.
    config = ds.EngineConfig(max_requests=batch, max_len=256, method="none", prefix_sharing=False, compile_cache=False)
    engine = ds.Engine(model, config)
    engine.prepare(batch, ds.Needs.of([ds.SamplingParams()]))
    prompts = bench_prompts(model, batch, PROMPT_LEN)
    generate(engine, prompts, LONG)
    found: dict[str, list[dict[str, float]]] = {"step": [], "prefill": []}
    for _ in range(rounds):
        short, long = (traced(engine, prompts, new_tokens) for new_tokens in (SHORT, LONG))
        steps = Counter(long[run_segment.__name__])
        steps.subtract(short[run_segment.__name__])
        spans_ms = [1e3 * generate(engine, prompts, new_tokens) for new_tokens in (1, SHORT, LONG)]
        found["step"].append(parts_ms(run_segment, steps, spans_ms[2] - spans_ms[1], LONG - SHORT))
        found["prefill"].append(parts_ms(prefill_sequences, short[prefill_sequences.__name__], spans_ms[0], 1))
    medians = {what: {part: median(parts[part] for parts in samples) for part in samples[0]} for what, samples in found.items()}
    machine = measure_machine(model.cfg)
    context = PROMPT_LEN + (SHORT + LONG) / 2
    limits = bound(model.cfg, machine, batch=batch, context=context, step_ms=medians["step"]["whole"])
    head_flop = 2 * batch * model.cfg.d_model * model.cfg.vocab_size  # a prefill makes no logits
    prefill_ms = (PROMPT_LEN - 1) * limits["compute_ms"] * (1 - head_flop / limits["flop"])
    least = {"step": limits, "prefill": {**limits, "compute_ms": prefill_ms}}
    about = {"model": name, "requests": batch, "machine": machine}
    return [{**about, "what": what, **parts, "bound": least[what]} for what, parts in medians.items()]


def generate(engine: ds.Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds of whole requests."""
    sampling = ds.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, sampling)
    return time.perf_counter() - began


def traced(engine: ds.Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Counter[str]]:
    """Milliseconds of each operation under jax's profiler, by the name of the function that has it."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            generate(engine, prompts, new_tokens)
        [path] = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spent: dict[str, Counter[str]] = {}
    for event in events:
        if module := event.get("args", {}).get("hlo_module"):
            spent.setdefault(module.removeprefix("jit_"), Counter())[event["name"]] += 1e-3 * event["dur"]
    return spent


def parts_ms(function: Any, spent: Mapping[str, float], span_ms: float, number: int) -> dict[str, float]:
    """Milliseconds of each part of what took `span_ms`, over `number`.

    Programs give the same names to other operations, so they are looked up in the program that has all that ran.
    """
    for program in PROGRAMS.made_from(function):
        lines = {match[1]: match for match in map(OPERATION.match, program.as_text().splitlines()) if match}
        # XLA runs a loop under another name than its text has.
        if all(name in lines or name.startswith(HOLDERS) for name in spent):
            break
    else:
        raise SystemExit(f"no program of {function.__name__} has all operations of the trace")
    parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0.0))
    for name, operation_ms in spent.items():
        if name in lines and lines[name][2] not in HOLDERS:
            parts[part_of(lines[name].string)] += operation_ms / number
    parts["host"] = max(span_ms / number - sum(parts.values()), 0.0)
    return {"whole": span_ms / number, **parts}


def part_of(line: str) -> str:
    """The part that one line of a compiled program belongs to."""
    if called := re.search(r'custom_call_target="(detspec_[a-z]+)', line):
        return CALLS.get(called[1], "rest of layers")
    return "sampling" if "/sample/" in line else "rest of layers"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, ms."""
    heads = ["model", "requests", "what", "whole", *PARTS, "memory needs", "arithmetic needs"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---:|---|{'---:|' * (len(heads) - 3)}"]
    for row in rows:
        numbers = [row["whole"], *(row[part] for part in PARTS), row["bound"]["memory_ms"], row["bound"]["compute_ms"]]
        lines.append(f"| {row['model']} | {row['requests']} | {row['what']} | {' | '.join(f'{x:.2f}' for x in numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
