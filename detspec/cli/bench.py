"""`detspec bench`: speed of ordinary and of deterministic generation, side by side."""

import argparse

from detspec.choices import BENCH_MODES
from detspec.cli.options import add_json, add_model, add_subcommand, keep_compiled, load_model, write_json

DESCRIPTION = """Measures tokens per second of ordinary and deterministic generation, at several batch sizes and percentages of
deterministic requests. After compiling, all cases run in turn, several times. Their bits are compared too. Modes: ordinary
(nothing is verified), canonical (one canonical row per request), batch_invariant (the same, with products in tiles that do
not depend on the batch, as batch-invariant kernels have them), dvr (self draft), auto (the engine chooses)."""


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "bench", "measure the price of determinism", DESCRIPTION)
    add_model(parser)
    parser.add_argument("--preset", metavar="NAME", help="random weights of this shape, instead of --model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="requests in flight")
    parser.add_argument(
        "--modes", nargs="+", choices=BENCH_MODES, default=list(BENCH_MODES), metavar="MODE", help="what to measure"
    )
    parser.add_argument(
        "--shares",
        type=int,
        nargs="+",
        default=[0, 10, 50, 100],
        metavar="PERCENT",
        help="percentages of requests that are deterministic",
    )
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[4, 16], metavar="W", help="window lengths for dvr; powers of two"
    )
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds")
    add_json(parser, "all samples")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    from detspec.bench.bench import BenchSettings, bench_table, random_model, run_bench
    from detspec.presets import preset
    from detspec.progress import Progress

    if args.preset is None:
        model = load_model(args)
    else:
        keep_compiled(args)
        model = random_model(preset(args.preset))
    settings = BenchSettings(
        batches=args.batches,
        modes=args.modes,
        shares=args.shares,
        windows=args.windows,
        prompt_len=args.prompt_len,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
    )
    with Progress(0, "runs") as progress:
        result = run_bench(model, settings, on_progress=progress.run_of)
    print(bench_table(result))
    write_json(args, result)
    return 0
