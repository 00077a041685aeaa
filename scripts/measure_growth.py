#!/usr/bin/env python
"""Milliseconds of a decoding step as one thing grows: capacity, context, vocabulary with each way to choose tokens, or layers.

Random weights of the shape of the shipped model, several requests at once, deterministic without a draft. A sample is the time
of long texts less that of short ones, over the steps between them, so that prompts do not count. All cases take turns, every
other round in reverse order. "of the first" is the median over the rounds of the ratio to the first case of the axis; at a
vocabulary, of the ratio to greedy decoding at the same vocabulary.

    python scripts/measure_growth.py --json out/growth.json --plot out/growth.png
    python scripts/measure_growth.py --axes vocabulary --requests 8
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

import detspec as ds
from detspec.bench.bench import bench_prompts, random_model
from detspec.compile_cache import enable_jax_cache
from detspec.config import ModelConfig
from detspec.model.dense import with_fields
from detspec.presets import preset
from detspec.viz.figures import COLOURS, matplotlib_needed

SHORT, LONG = 16, 48  # new tokens of the two texts whose times are compared
SIZES = {
    "max_len": (512, 2048, 8192, 32768),
    "context": (64, 512, 2048, 8192),
    "vocabulary": (2048, 16384, 65536, 151936),
    "layers": (4, 12, 24, 48),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.8": {"temperature": 0.8},
    "T 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T 0.8, top_k 20, top_p 0.95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of an engine's run."""

    axis: str
    size: int
    way: str = "greedy"

    @property
    def cfg(self) -> ModelConfig:
        """The shape of the model."""
        grown = {"vocabulary": "vocab_size", "layers": "num_layers"}.get(self.axis)
        return with_fields(preset("tiny_python"), max_position=32768, **({grown: self.size} if grown else {}))

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt."""
        return self.size if self.axis == "context" else 64

    @property
    def max_len(self) -> int:
        """Capacity of the engine."""
        return {"max_len": self.size, "context": 2 * self.size + 512}.get(self.axis, 512)  # prompts stay in the cache

    @property
    def first(self) -> "Case":
        """The case that this is compared with."""
        if self.axis == "vocabulary":
            return dataclasses.replace(self, way="greedy")
        return dataclasses.replace(self, size=SIZES[self.axis][0])

    @property
    def label(self) -> str:
        """Short name for progress and tables."""
        return f"{self.axis} {self.size}, {self.way}" if self.axis == "vocabulary" else f"{self.axis} {self.size}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes JSON and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", default=list(SIZES), choices=list(SIZES), help="what grows")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="requests at once")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="number of rounds; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help='draw the medians; needs ".[plots]"')
    args = parser.parse_args(argv)
    for name in ("requests", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install ".[plots]"')
    enable_jax_cache()
    samples = measure([case for axis in args.axes for case in cases_of(axis)], args.requests, args.repeats)
    rows = [row_of(case, samples) for case in samples]
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"fingerprint": ds.fingerprint(), "requests": args.requests, "rows": rows}, indent=1) + "\n"
        )
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(args.plot, rows)
    return 0


def cases_of(axis: str) -> list[Case]:
    """All sizes of `axis`; at a vocabulary all ways to choose tokens."""
    return [Case(axis, size, way) for size in SIZES[axis] for way in (WAYS if axis == "vocabulary" else ["greedy"])]


def measure(cases: Sequence[Case], num_requests: int, repeats: int) -> dict[Case, list[float]]:
    """Seconds of a step, `repeats` samples of each case."""
    engines: dict[tuple[ModelConfig, int], ds.Engine] = {}
    samples: dict[Case, list[float]] = {case: [] for case in cases}
    with tqdm(total=len(cases) * (repeats + 1), unit="run", disable=None) as progress:
        for number in range(repeats + 1):
            for case in cases if number % 2 == 0 else reversed(cases):
                progress.set_description(f"{case.label}{': compiling and certifying' if number == 0 else ''}")
                key = case.cfg, case.max_len
                if key not in engines:
                    config = ds.EngineConfig(max_requests=num_requests, max_len=case.max_len, method="none")
                    engines[key] = ds.Engine(random_model(case.cfg), config)
                step_s = sample(engines[key], case, num_requests)
                if number > 0:  # the first run compiles
                    samples[case].append(step_s)
                progress.update()
    return samples


def sample(engine: ds.Engine, case: Case, num_requests: int) -> float:
    """Seconds of one step."""
    prompts = bench_prompts(engine.model, num_requests, case.prompt_len)
    engine.prepare(num_requests, ds.Needs.of([ds.SamplingParams(**WAYS[case.way])]))  # nothing is compiled in between
    seconds = {}
    for number in (SHORT, LONG):
        sampling = [
            ds.SamplingParams(max_tokens=number, ignore_eos=True, seed=i, **WAYS[case.way]) for i in range(num_requests)
        ]
        began = time.perf_counter()
        engine.generate(prompts, sampling)
        seconds[number] = time.perf_counter() - began
    return (seconds[LONG] - seconds[SHORT]) / (LONG - SHORT)


def row_of(case: Case, samples: dict[Case, list[float]]) -> dict[str, Any]:
    """Medians and samples of one case."""
    ratios = [own / other for own, other in zip(samples[case], samples[case.first], strict=True)]
    return {
        "axis": case.axis,
        "size": case.size,
        "way": case.way,
        "step_ms": 1e3 * median(samples[case]),
        "of_first": median(ratios),
        "samples_s": samples[case],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| what grows | to | tokens chosen by | ms a step | of the first |", "|---|---:|---|---:|---:|"]
    lines += [f"| {r['axis']} | {r['size']} | {r['way']} | {r['step_ms']:.2f} | {r['of_first']:.2f} |" for r in rows]
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a PNG with a panel for each axis."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    names = list(dict.fromkeys(row["axis"] for row in rows))
    figure = Figure(figsize=(3.2 * len(names), 3.2), dpi=150, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for way, colour in zip(WAYS, COLOURS, strict=False):
            points = [(row["size"], row["step_ms"]) for row in rows if (row["axis"], row["way"]) == (name, way)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.6, color=colour, label=way)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES[name], [str(size) for size in SIZES[name]], fontsize=7)
        axes.minorticks_off()
        axes.set(title=name, ylabel="ms a step" if name == names[0] else "", ylim=(0, None))
        axes.grid(alpha=0.25)
        if name == "vocabulary":
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
