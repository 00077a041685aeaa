#!/usr/bin/env python
"""The price of determinism: throughput of one engine, by the share of its requests that is deterministic.

The same requests run at each share, all to their full length, so that every run does the same work. Two workloads, for `rows`
requests in flight:

    steady  many more requests than fit in flight, of mixed lengths: finished ones are replaced all the time
    tail    twice as many requests as fit in flight, one in eight ten times as long: few are left at the end

A warm-up of every run compiles and certifies. Then all runs take turns, every other round in reverse order. A run is compared
with the run at 0 % of its own round. An engine that never serves deterministic requests runs the ordinary ones, too: this shows
the price of sharing an engine. Deterministic requests must give the same bits in all runs; otherwise the exit code is 1.

    python scripts/bench_share.py --json out/share.json --plot out/share.png
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from detspec import Engine, EngineConfig, InputError, Model, Needs, Request, SamplingParams, default_schedule, load
from detspec.bench.bench import bench_prompts, random_model
from detspec.bench.rounds import Variants, counted_runs
from detspec.model.dense import config_to_json
from detspec.model.params import num_params
from detspec.presets import preset
from detspec.progress import Progress

TARGETS = {10: 0.98, 100: 0.95}  # least throughput by share, relative to 0 %
RESAMPLES = 4000
ORDINARY_TARGET = 0.99  # least throughput of ordinary requests, relative to an engine without deterministic ones
QUICK = {"rows": [4], "shares": [0, 10, 100], "repeats": 2, "scale": 0.25}


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests of one kind of traffic.

    Attributes:
        name: name in tables.
        per_row: least number of requests for each request in flight.
        multiple: the number of requests is a multiple of this, so that shares are whole numbers of requests.
        prompt_len: shortest and longest prompt.
        new_tokens: least and most new tokens.
        long_tokens: least and most new tokens of one request in eight; None if there are no long requests.
    """

    name: str
    per_row: int
    multiple: int
    prompt_len: tuple[int, int]
    new_tokens: tuple[int, int]
    long_tokens: tuple[int, int] | None = None

    def num_requests(self, rows: int) -> int:
        """Number of requests for an engine with `rows` requests in flight."""
        return -(-self.per_row * rows // self.multiple) * self.multiple

    def requests(self, model: Model, number: int, *, scale: float, temperature: float, seed: int) -> list[Request]:
        """Ordinary requests with lengths times `scale`; for any `number` up to 256 the first requests are the same."""
        rng = np.random.default_rng(seed)

        def length(bounds: tuple[int, int]) -> int:
            return max(1, round(scale * rng.integers(*bounds, endpoint=True)))

        prompts = bench_prompts(model, 256, max(1, round(scale * self.prompt_len[1])))
        requests = []
        for i, prompt in zip(range(number), prompts, strict=False):
            if i % 8 == 0:
                long_one = i + rng.integers(8)
            new_tokens = self.long_tokens if self.long_tokens and i == long_one else self.new_tokens
            sampling = SamplingParams(
                max_tokens=length(new_tokens), temperature=temperature, seed=i, ignore_eos=True, deterministic=False
            )
            requests.append(Request(str(i), prompt[: length(self.prompt_len)], sampling))
        return requests


WORKLOADS = (
    Workload("steady", per_row=4, multiple=50, prompt_len=(16, 128), new_tokens=(32, 160)),
    Workload("tail", per_row=2, multiple=1, prompt_len=(16, 64), new_tokens=(16, 64), long_tokens=(300, 500)),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A timed run; `ordinary_engine` means an engine that never serves a deterministic request."""

    workload: str
    rows: int
    share: int
    num_requests: int
    num_deterministic: int
    ordinary_engine: bool = False

    @property
    def label(self) -> str:
        """Short name for progress bars."""
        return f"{self.workload}, {self.rows} in flight, {self.share} %{', ordinary engine' if self.ordinary_engine else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes JSON and plot; returns 1 if a deterministic request has two results."""
    args = parse(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise InputError('--plot needs matplotlib: pip install ".[plots]"')
    model = random_model(preset(args.preset)) if args.preset else load(args.model)
    with Progress(0, "runs") as progress:
        result = measure(model, args, progress.run_of)
    print(table(result))
    for path in (args.json, args.plot):
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        draw(result, args.plot)
    return int(result["bits"]["deterministic_variants"] > 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="a model folder (default: the shipped model)")
    which.add_argument("--preset", metavar="NAME", help="random weights of this shape")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", default=names, choices=names, help="kinds of traffic")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16, 32], metavar="N", help="requests in flight")
    shares = {"default": [0, 2, 10, 20, 50, 100], "help": "percentages of requests that are deterministic"}
    parser.add_argument("--shares", type=int, nargs="+", metavar="PERCENT", **shares)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="number of rounds; the median counts")
    parser.add_argument("--scale", type=float, default=1.0, metavar="F", help="factor for lengths of prompts and texts")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")
    parser.add_argument(
        "--stream", action="store_true", help="each request streams its tokens, so the host looks at every step"
    )
    parser.add_argument("--processing", action="store_true", help="programs that could process logits, as those of servers")
    parser.add_argument("--seed", type=int, default=0, help="decides lengths, and which requests are deterministic")
    parser.add_argument("--quick", action="store_true", help="4 requests in flight, few shares, short texts: a quick check")
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    parser.add_argument("--plot", metavar="FILE.png", help='draw ratio over share; needs ".[plots]"')
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    if bad := [share for share in args.shares if not 0 <= share <= 100]:
        raise InputError(f"--shares are percentages from 0 to 100, got {bad[0]}")
    for name, least in (("rows", min(args.rows)), ("repeats", args.repeats)):
        if least < 1:
            raise InputError(f"--{name} must be at least 1, got {least}")
    if not 0 < args.scale <= 8:
        raise InputError(f"--scale must be greater than 0 and at most 8, got {args.scale}")
    return args


def measure(model: Model, args: argparse.Namespace, on_progress: Callable[[int, int, str], None]) -> dict[str, Any]:
    """All samples and their medians, as a dictionary that JSON can hold."""
    workloads = [workload for workload in WORKLOADS if workload.name in args.workloads]
    shape = {"scale": args.scale, "temperature": args.temperature, "seed": args.seed}
    requests = {w.name: w.requests(model, w.num_requests(max(args.rows)), **shape) for w in workloads}
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for some in requests.values() for r in some)
    # With prefix sharing, later runs would find the prompts of earlier ones in the cache and skip timed work.
    config = EngineConfig(max_len=max(longest, default_schedule().budget.window, 16), prefix_sharing=False)
    cells = [cell for workload in workloads for rows in args.rows for cell in cells_of(workload, rows, args.shares)]
    kinds = dict.fromkeys((cell.rows, cell.ordinary_engine) for cell in cells)
    engines = {kind: Engine(model, dataclasses.replace(config, max_requests=kind[0])) for kind in kinds}
    variants = {workload.name: Variants() for workload in workloads}
    samples: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    on_run = counted_runs(len(cells) * (args.repeats + 1), on_progress)
    load_average = os.getloadavg()[0]

    def run(cell: Cell) -> dict[str, float]:
        chosen = mixed(requests[cell.workload][: cell.num_requests], cell.num_deterministic, args.seed)
        return run_once(engines[cell.rows, cell.ordinary_engine], chosen, variants[cell.workload], stream=args.stream)

    for cell in cells:
        on_run(f"{cell.label}: compiling and certifying")
        engine = engines[cell.rows, cell.ordinary_engine]
        needs = Needs(deterministic=not cell.ordinary_engine, processing=args.processing)
        engine.prepare(needs=needs)  # nothing is made in between
        run(cell)
    for number in range(args.repeats):
        for cell in cells if number % 2 == 0 else reversed(cells):
            on_run(cell.label)
            samples[cell].append(run(cell))
    counts = [found.counts() for found in variants.values()]
    return {
        "fingerprint": engines[cells[0].rows, False].fingerprint(),
        "model": {**config_to_json(model.cfg), "num_params": num_params(model.cfg)},
        "settings": {**vars(args), "cpu_count": os.cpu_count(), "load_average": load_average},
        "workloads": [dataclasses.asdict(workload) for workload in workloads],
        "cells": [summary(cell, samples) for cell in cells],
        "bits": {
            "deterministic_variants": max(count["deterministic_variants"] for count in counts),
            "ordinary_compared": sum(count["ordinary_compared"] for count in counts),
            "ordinary_differ": sum(count["ordinary_differ"] for count in counts),
        },
    }


def cells_of(workload: Workload, rows: int, shares: Sequence[int]) -> list[Cell]:
    """The runs of a workload with `rows` requests in flight, 0 % first.

    Shares are rounded up to whole requests; shares that give the same number run once.
    """
    number = workload.num_requests(rows)
    numbers = {-(-share * number // 100): share for share in sorted({0, *shares})}
    cells = [Cell(workload.name, rows, share, number, num_deterministic) for num_deterministic, share in numbers.items()]
    return [cells[0], dataclasses.replace(cells[0], ordinary_engine=True), *cells[1:]]


def mixed(requests: list[Request], num_deterministic: int, seed: int) -> list[Request]:
    """Makes `num_deterministic` of the requests deterministic; larger numbers include the choice of smaller ones."""
    chosen = set(np.random.default_rng(seed).permutation(len(requests))[:num_deterministic].tolist())
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, deterministic=i in chosen))
        for i, request in enumerate(requests)
    ]


def run_once(engine: Engine, requests: list[Request], variants: Variants, *, stream: bool) -> dict[str, float]:
    """Times a run, from the first request to the last completion."""
    completions = []
    live_seconds = 0.0
    busy_s = engine.busy_s
    idle_s = engine.idle_s
    preempted = engine.num_preemptions
    began = looked = time.perf_counter()
    for request in requests:
        engine.add(request, stream=stream)
    while engine.has_work:
        in_use = engine.num_live  # as the segment began; below as it ended
        completions += [update.completion for update in engine.step() if update.completion is not None]
        now = time.perf_counter()
        live_seconds += (now - looked) * (in_use + engine.num_live) / 2
        looked = now
    seconds = time.perf_counter() - began
    busy_s = engine.busy_s - busy_s
    idle_s = engine.idle_s - idle_s
    for completion in completions:
        deterministic = requests[int(completion.id)].sampling.deterministic
        variants.add("deterministic" if deterministic else "ordinary", completion)
    new_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "seconds": seconds,
        "tok_per_s": (new_tokens + sum(len(request.prompt_token_ids) for request in requests)) / seconds,
        "new_tok_per_s": new_tokens / seconds,
        "idle_share": idle_s / (busy_s + idle_s),
        "live_requests": live_seconds / seconds,
        "num_preemptions": engine.num_preemptions - preempted,
    }


def summary(cell: Cell, samples: dict[Cell, list[dict[str, float]]]) -> dict[str, Any]:
    """Samples and medians of a cell.

    `ratios` compare with the run at 0 % in the same engine and round. Those of 0 % compare with the ordinary engine, whose own
    ratios are 1.
    """
    zero = dataclasses.replace(cell, share=0, num_deterministic=0)
    other = zero if cell.share else dataclasses.replace(zero, ordinary_engine=True)
    tok_per_s = [sample["tok_per_s"] for sample in samples[cell]]
    ratios = [mine / its["tok_per_s"] for mine, its in zip(tok_per_s, samples[other], strict=True)]
    medians = {f"median_{name}": median(s[name] for s in samples[cell]) for name in ("seconds", "tok_per_s", "new_tok_per_s")}
    return {
        **dataclasses.asdict(cell),
        **medians,
        "ratios": ratios,
        "ratio": median(ratios),
        "idle_share": mean(sample["idle_share"] for sample in samples[cell]),
        "live_requests": mean(sample["live_requests"] for sample in samples[cell]),
        "num_preemptions": sum(sample["num_preemptions"] for sample in samples[cell]),
        "samples": samples[cell],
    }


def table(result: dict[str, Any]) -> str:
    """Aligned text: a line for each run, then the targets met and missed, and the comparison of bits."""
    settings = result["settings"]
    versions = result["fingerprint"]
    bits = result["bits"]
    how = f"temperature {settings['temperature']}" if settings["temperature"] else "greedy"
    how += ", streamed" if settings["stream"] else ""
    lines = [
        f"{result['model']['num_params'] / 1e6:.1f} M parameters, {result['model']['dtype']}, {how}; lengths x "
        f"{settings['scale']}; median, lowest and highest of {settings['repeats']}; {versions['device_kind']}, "
        f"{settings['cpu_count']} cores, load {settings['load_average']:.1f} at first, jax {versions['jax']}",
        "",
        f"{'workload':<9}{'rows':>5}{'deterministic':>20}{'tok/s':>9}{'new tok/s':>11}{'/ 0 %':>8}{'lowest':>8}{'highest':>8}"
        f"{'idle':>7}{'live':>7}{'preempted':>11}",
    ]
    for cell in result["cells"]:
        kind = f"{cell['num_deterministic']} of {cell['num_requests']} = {cell['share']:>3} %"
        kind = "ordinary engine" if cell["ordinary_engine"] else kind
        ratios = (cell["ratio"], min(cell["ratios"]), max(cell["ratios"])) if cell["share"] else ()
        lines.append(
            f"{cell['workload']:<9}{cell['rows']:>5}{kind:>20}{cell['median_tok_per_s']:>9.0f}"
            f"{cell['median_new_tok_per_s']:>11.0f}{''.join(format(ratio, '>8.3f') for ratio in ratios):>24}"
            f"{cell['idle_share']:>7.1%}{cell['live_requests']:>7.1f}{cell['num_preemptions']:>11}"
        )
    shared = [cell for cell in result["cells"] if not cell["ordinary_engine"]]
    lines.append("")
    for share, target in TARGETS.items():
        lines += judged(f"{share} % deterministic / 0 %", target, [cell for cell in shared if cell["share"] == share])
    lines += judged("0 % / ordinary engine", ORDINARY_TARGET, [cell for cell in shared if cell["share"] == 0])
    lines.append(
        f"bits: {bits['deterministic_variants']} different result(s) of any deterministic request; "
        f"{bits['ordinary_differ']} of {bits['ordinary_compared']} ordinary results differ from the deterministic ones"
    )
    return "\n".join(lines)


def judged(name: str, target: float, cells: list[dict[str, Any]]) -> list[str]:
    """A line for cells that met `target`, a line for cells that missed it, and a line for all ratios together."""
    lines = []
    for met, word in ((True, "met"), (False, "missed")):
        places = [f"{c['workload']} {c['rows']} {c['ratio']:.3f}" for c in cells if (c["ratio"] >= target) is met]
        if places:
            lines.append(f"target {name} >= {target}: {word} by {', '.join(places)}")
    ratios = np.asarray([ratio for cell in cells for ratio in cell["ratios"]])
    if ratios.size > 1:
        low, high = median_interval(ratios)
        lines.append(f"    all {ratios.size} ratios together: median {median(ratios):.3f}, {low:.3f} to {high:.3f} with 95 %")
    return lines


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % confidence interval of the median of `values`, by percentile bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, values.size))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def draw(result: dict[str, Any], path: str) -> None:
    """Draws ratio over share: a panel per workload, a line per number of requests in flight, bars between quartiles."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [workload["name"] for workload in result["workloads"]]
    rows = result["settings"]["rows"]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.8, len(rows)))
    figure = Figure(figsize=(2 + 5 * len(names), 4.2), layout="constrained")
    all_axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(all_axes, names, strict=True):
        axes.axhline(1, color="0.6", linewidth=0.8)
        targets = np.array(list(TARGETS.items())).T
        axes.plot(targets[0] ** 0.5, targets[1], "_", color="0.3", markersize=18, markeredgewidth=1.5, label="target")
        for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
            shared = [cell for cell in result["cells"] if cell["share"]]
            cells = [cell for cell in shared if (cell["workload"], cell["rows"]) == (name, row)]
            aside = 0.1 * (i - (len(rows) - 1) / 2)  # keeps bars at one share apart
            x = [0.0, *((100 * cell["num_deterministic"] / cell["num_requests"]) ** 0.5 + aside for cell in cells)]
            y = np.array([1.0, *(cell["ratio"] for cell in cells)])
            low, high = np.transpose([(1.0, 1.0), *(np.percentile(cell["ratios"], (25, 75)) for cell in cells)])
            bars = axes.errorbar(x, y, (y - low, high - y), color=colour, elinewidth=1, label=f"{row} in flight")
            bars.lines[0].set(marker="o", markersize=4)
        ticks = (0, 2, 10, 20, 50, 100)  # a square-root scale gives small shares more room
        axes.set(title=name, xlabel="deterministic requests [%], square-root scale")
        axes.set_xticks(np.sqrt(ticks), [str(tick) for tick in ticks])
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("throughput / throughput at 0 %\nmedian and quartiles of rounds")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"bench_share: error: {error}")
