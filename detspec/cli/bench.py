"""`detspec bench`: speed of ordinary and of deterministic generation, side by side."""

import argparse
import dataclasses

from detspec.choices import BENCH_MODES
from detspec.cli.options import add_json, add_model, add_weights, keep_compiled, load_model, loading_of, write_json
from detspec.say import say

SUMMARY = "measure the price of determinism"
DESCRIPTION = """Measures tokens per second of ordinary and deterministic generation, at several batch sizes and percentages of
deterministic requests. After compiling, all cases run in turn, several times. Their bits are compared too. Modes: ordinary
(nothing is verified), canonical (one canonical row per request), batch_invariant (the same, with products in tiles that do
not depend on the batch, as batch-invariant kernels have them), dvr (self draft), auto (the engine chooses)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add_model(parser)
    add_weights(parser)
    add("--preset", metavar="NAME", help="random weights of this shape, instead of --model")
    add("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="requests in flight")
    add("--modes", nargs="+", choices=BENCH_MODES, default=list(BENCH_MODES), metavar="MODE", help="what to measure")
    add("--shares", type=int, nargs="+", default=[0, 10, 50, 100], metavar="PERCENT", help="deterministic requests in percent")
    add("--windows", type=int, nargs="+", default=[4, 16], metavar="W", help="window lengths for dvr; powers of two")
    add("--prompt-len", type=int, default=64, metavar="N", help="tokens of each prompt")
    add("--new-tokens", type=int, default=128, metavar="N", help="new tokens of each request")
    add("--repeats", type=int, default=5, metavar="N", help="rounds")
    add_json(parser, "all samples")


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    from detspec.bench.bench import BenchSettings, bench_table, random_model, run_bench
    from detspec.presets import preset
    from detspec.progress import Progress

    if args.preset is None:
        model = load_model(args)
    else:
        say(f"random weights of the shape {args.preset}")
        keep_compiled(args)
        model = random_model(loading_of(args).config(preset(args.preset)))
    settings = BenchSettings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(BenchSettings)})
    with Progress(0, "runs") as progress:
        result = run_bench(model, settings, on_progress=progress.run_of)
    print(bench_table(result))
    write_json(args, result)
    return 0
