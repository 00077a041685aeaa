"""`detspec bench`: speed of ordinary and of deterministic generation, side by side."""

import argparse
import json
import sys
from pathlib import Path

from detspec.cli.options import add_model, add_subcommand, keep_compiled, load_model

DESCRIPTION = """Measures tokens a second of ordinary and of deterministic generation at several batch sizes and percentages of
deterministic requests, in turn and repeatedly, after compiling; compares the bits, too. Modes: fast (nothing verified),
canonical (one canonical row a request), batch_invariant (the same with products in tiles that do not depend on the batch:
the way of batch-invariant kernels), dvr (self draft), auto (the engine chooses)."""
MODES = ("fast", "canonical", "batch_invariant", "dvr", "auto")


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "bench", "measure the price of determinism", DESCRIPTION)
    add_model(parser)
    parser.add_argument("--preset", metavar="NAME", default=argparse.SUPPRESS, help="random weights of this shape, not --model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="requests in flight")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help="what to measure")
    parser.add_argument("--shares", type=int, nargs="+", default=[0, 10, 50, 100], metavar="PERCENT", help="of deterministic")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 16], metavar="W", help="of dvr; powers of two")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds")
    parser.add_argument("--json", metavar="FILE", default=argparse.SUPPRESS, help="write all samples there, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    from detspec.bench.bench import bench_table, random_model, run_bench
    from detspec.presets import preset
    from detspec.progress import Progress

    if hasattr(args, "preset"):
        keep_compiled(args)
        model = random_model(preset(args.preset))
    else:
        model = load_model(args)
    with Progress(0, "runs") as progress:
        result = run_bench(
            model,
            batches=args.batches,
            modes=args.modes,
            shares=args.shares,
            windows=args.windows,
            prompt_len=args.prompt_len,
            new_tokens=args.new_tokens,
            repeats=args.repeats,
            on_progress=progress.run_of,
        )
    print(bench_table(result))
    if hasattr(args, "json"):
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"detspec: wrote {args.json}", file=sys.stderr)
    return 0
