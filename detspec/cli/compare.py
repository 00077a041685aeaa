"""`detspec compare`: where the texts of two outputs fork, and which log-probabilities differ."""

import argparse
from pathlib import Path

from detspec.errors import InputError
from detspec.say import say

SUMMARY = "show where two outputs differ, in tokens and in bits"
DESCRIPTION = """Compares two outputs of `detspec generate`, request by request: tokens, and bits of log-probabilities. Prints
how many texts fork, where each does and how both go on, and requests that only one output has. Exit codes: 0 both are equal;
1 they differ; 2 bad input."""
DETAILS = """Requests are matched by id and number of the sample. Log-probabilities are compared up to the fork: after it, they
are of other tokens. Files may also be parquet files that `detspec convert-output` wrote. Memory holds both."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    for side in "ab":
        parser.add_argument(side, type=Path, metavar=f"{side.upper()}.jsonl", help="an output: .jsonl or .parquet")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help='draw forks and differences; .svg and .pdf do, too; needs ".[plots]"'
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if both outputs are equal, else 1."""
    from detspec.jobs.comparison import compare

    comparison = compare(args.a, args.b)
    print(comparison)
    if args.plot:
        from detspec.traces import comparison_figure

        try:
            comparison_figure(comparison).savefig(args.plot, dpi=150)
        except (OSError, ValueError) as error:
            raise InputError(f"--plot {args.plot} cannot be written: {error}") from error
        say(f"wrote {args.plot}")
    return 0 if comparison.equal else 1
