"""`detspec convert-output`: outputs of jobs as parquet files."""

import argparse
from pathlib import Path

from detspec.errors import InputError
from detspec.say import say

SUMMARY = "write the output of a job as a parquet file"
DESCRIPTION = """Writes the lines of an output of `detspec generate` as rows of a parquet file, in the same order. Columns are
the keys of the lines: token_ids are lists of int32, logprobs lists of float32 with the bits of the lines; what is nested deeper
is JSON text. Memory holds a thousand rows. It needs pyarrow. Exit codes: 0 success; 2 bad input;
3 the disk is full."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    parser.add_argument("source", type=Path, metavar="OUT.jsonl", help="the output of a job")
    parser.add_argument("target", type=Path, metavar="OUT.parquet", help="the file to write")
    parser.add_argument("--fresh", action="store_true", help="write over a file that is there already")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if the disk is full."""
    from detspec.jobs.convert_output import convert_output
    from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE

    if args.target.suffix != ".parquet":
        raise InputError(f"{args.target} must end in .parquet")
    say(f"reading {args.source}")
    try:
        num_rows = convert_output(args.source, args.target, fresh=args.fresh)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        say(f"error: cannot write {args.target}: {error.strerror}")
        return NO_ROOM_CODE
    say(f"{num_rows} rows in {args.target}")
    return 0
