#!/usr/bin/env python
"""Speed over ordinary generation by draft source, workload and number of requests; all requests are deterministic.

Workloads, on the shipped model of Python source code:

    code     beginnings of functions and classes, greedy
    edits    a text, the same text with some tokens changed, and its beginning: greedy, the model goes on with one of them
    random   prompts of random tokens, greedy
    T 0.8    the prompts of code, at random
    T 1      the same at temperature 1
    mixed    all of these in one batch

A run answers eight requests or more, as many at once as are named, with the same number of new tokens each. After a warm-up, in
which plans are compiled, certified and timed, all methods take turns, every other round in reverse order. A speed is the median
over the rounds of the ratio to ordinary generation in the same round. Deterministic methods must give the same bits; otherwise
the exit code is 1.

    python scripts/bench_drafts.py --json docs/data/drafts.json --plot docs/drafts.png
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from tqdm import tqdm

import detspec as ds
from detspec.compile_cache import enable_jax_cache
from detspec.viz.figures import COLOURS, matplotlib_needed

METHODS = ("ordinary", "none", "ngram", "auto")
NEW = 192  # tokens of each request
LEAST = 8  # requests of a run: one at a time where there is one place, since single texts repeat themselves more or less
MAX_LEN = 768
BEGINNINGS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\nclass Reader:\n",
    "for i in range(10):\n    print(",
    "def main():\n    parser = argparse.ArgumentParser()\n",
    "class Node:\n    def __init__(self, value):\n",
    "with open(path) as f:\n",
    "try:\n    import json\n",
    "def test_add():\n    assert",
)
CHANGED_EVERY = 24  # tokens of the text that is edited
WORKLOADS = ("code", "edits", "random", "T 0.8", "T 1", "mixed")


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request, still without its kind."""

    prompt: list[int]
    temperature: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes JSON and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="requests at once")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS[1:]), choices=METHODS[1:], help="next to ordinary")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="number of rounds; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help='draw the speeds; needs ".[plots]"')
    args = parser.parse_args(argv)
    if min(*args.requests, args.repeats) < 1:
        parser.error("--requests and --repeats must be at least 1")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install ".[plots]"')
    enable_jax_cache()
    methods = ["ordinary", *args.methods]
    rows = measure(ds.load(), args.requests, args.workloads, methods, args.repeats)
    print(table(rows, args.methods))
    for path, write in ((args.json, write_json), (args.plot, draw)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, rows)
    return 0 if all(row["same_bits"] for row in rows) else 1


def asks_of(workload: str, model: ds.Model, num: int) -> list[Ask]:
    """The requests of a workload, `num` of them."""
    assert model.tokenizer is not None
    begun = [model.tokenizer.encode(text) for text in BEGINNINGS]
    if workload == "random":
        rng = np.random.default_rng(0)
        return [Ask(rng.integers(3, model.cfg.vocab_size, 64).tolist(), 0.0) for _ in range(num)]
    if workload == "edits":
        return [Ask(_edit(model, begun[i % len(begun)]), 0.0) for i in range(num)]
    if workload == "mixed":
        each = [asks_of(other, model, num) for other in WORKLOADS if other != "mixed"]
        return [each[i % len(each)][i] for i in range(num)]
    temperature = {"code": 0.0, "T 0.8": 0.8, "T 1": 1.0}[workload]
    return [Ask(begun[i % len(begun)], temperature) for i in range(num)]


def _edit(model: ds.Model, begun: list[int]) -> list[int]:
    """A text that the model wrote, the same with a token changed here and there, and its beginning once more."""
    (text,) = ds.Engine(model, ds.EngineConfig(max_requests=1, max_len=MAX_LEN)).generate(
        [begun], ds.SamplingParams(max_tokens=NEW - len(begun), ignore_eos=True, temperature=0.8, seed=len(begun))
    )
    whole = [*begun, *text.token_ids]
    changed = [token if i % CHANGED_EVERY else (token + 1) % model.cfg.vocab_size for i, token in enumerate(whole, start=1)]
    return [*whole, *changed, *begun]


def measure(
    model: ds.Model, sizes: Sequence[int], workloads: Sequence[str], methods: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """A row of figures for each workload and number of requests."""
    rows = []
    with tqdm(total=len(sizes) * len(workloads) * len(methods) * (repeats + 1), unit="run", disable=None) as progress:
        for num in sizes:
            engines = {name: _engine(model, num, name) for name in methods}
            for workload in workloads:
                progress.set_description(f"{workload}, {num} requests")
                rows.append(_measure(engines, asks_of(workload, model, max(num, LEAST)), repeats, progress))
                rows[-1] |= {"workload": workload, "requests": num}
    return rows


def _engine(model: ds.Model, num: int, name: str) -> ds.Engine:
    """Ordinary requests are those of an engine that has no drafts; "auto" decides among all."""
    method = "none" if name == "ordinary" else name
    return ds.Engine(model, ds.EngineConfig(max_requests=num, max_len=MAX_LEN, method=method, prefix_sharing=False))


def _measure(engines: dict[str, ds.Engine], asks: Sequence[Ask], repeats: int, progress: tqdm) -> dict[str, Any]:
    """All methods in turns over the same requests."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    found: dict[str, list[ds.Completion]] = {}
    for number in range(repeats + 1):
        for name in engines if number % 2 == 0 else reversed(engines):
            engine = engines[name]
            sampling = [
                ds.SamplingParams(
                    max_tokens=NEW, temperature=ask.temperature, seed=i, ignore_eos=True, deterministic=name != "ordinary"
                )
                for i, ask in enumerate(asks)
            ]
            engine.prepare(engine.config.max_requests, ds.Needs.of(sampling))
            began = time.perf_counter()
            found[name] = engine.generate([ask.prompt for ask in asks], sampling)
            if number > 0:
                seconds[name].append(time.perf_counter() - began)
            progress.update()
    deterministic = [name for name in engines if name != "ordinary"]
    row: dict[str, Any] = {
        "seconds": seconds,
        "speed": {
            name: median(o / s for o, s in zip(seconds["ordinary"], seconds[name], strict=True)) for name in deterministic
        },
        "tokens_a_step": {name: _tokens_a_step(found[name]) for name in deterministic},
        "same_bits": len({_bits(found[name]) for name in deterministic}) == 1,
    }
    if "ngram" in engines:
        row["acceptance_by_match_length"] = engines["ngram"].acceptance_by_match_length
    return row


def _tokens_a_step(found: Sequence[ds.Completion]) -> float:
    """New tokens over the canonical passes that each request took part in."""
    return sum(len(c.token_ids) for c in found) / max(1, sum(c.stats.num_verify_passes for c in found))


def _bits(found: Sequence[ds.Completion]) -> bytes:
    return b"".join(np.int32(c.token_ids).tobytes() + np.float32(c.logprobs).tobytes() for c in found)


def table(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    """The speeds in Markdown, with tokens a step, and the geometric mean of each method."""
    lines = [f"| requests | workload | {' | '.join(methods)} | same bits |", f"|---|---|{'---|' * (len(methods) + 1)}"]
    for row in rows:
        cells = [f"{row['speed'][name]:.2f} ({row['tokens_a_step'][name]:.2f})" for name in methods]
        lines.append(f"| {row['requests']} | {row['workload']} | {' | '.join(cells)} | {'yes' if row['same_bits'] else 'NO'} |")
    means = [f"{geometric_mean(row['speed'][name] for row in rows):.2f}" for name in methods]
    lines.append(f"| all | geometric mean | {' | '.join(means)} | |")
    return "speed over ordinary generation (tokens a step)\n\n" + "\n".join(lines)


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All figures, with what they were measured on."""
    path.write_text(json.dumps({"fingerprint": ds.fingerprint(), "new_tokens": NEW, "rows": rows}, indent=1) + "\n")


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Bars of the speeds, a panel for each number of requests."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    sizes = sorted({row["requests"] for row in rows})
    methods = list(rows[0]["speed"])
    figure = Figure(figsize=(4 * len(sizes), 3.6), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0], sizes, strict=True):
        own = [row for row in rows if row["requests"] == size]
        for number, name in enumerate(methods):
            places = [i + (number - (len(methods) - 1) / 2) * 0.8 / len(methods) for i in range(len(own))]
            axes.bar(places, [row["speed"][name] for row in own], 0.8 / len(methods), label=name, color=COLOURS[number])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(own)), [row["workload"] for row in own], rotation=30)
        axes.set_title(f"{size} request{'s' if size > 1 else ''}")
    figure.axes[0].set_ylabel("speed over ordinary generation")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), title="method", loc="outside right upper")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
