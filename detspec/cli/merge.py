"""`detspec merge`: joins the outputs of all shards."""

import argparse
import sys
from pathlib import Path

from detspec.cli.options import add_subcommand

DESCRIPTION = """Joins the outputs of `detspec generate --shard I/N`. The result has the bytes, the manifest and the rejected
lines of one job without shards; statistics are added up. Every shard must be present, finished, unchanged and from the same
job. No output appears under its name until it is whole. An old OUT.jsonl is overwritten; the shards stay. Exit codes: 0
success; 2 something is wrong with the shards; 3 the disk is full."""


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "merge", "join the outputs of shards", DESCRIPTION)
    parser.add_argument("--out", required=True, metavar="OUT.jsonl", help="the --out of the job")
    parser.add_argument("shards", nargs="*", type=Path, metavar="SHARD", help="default: OUT.*-of-*.jsonl")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if the disk is full."""
    from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, check_out
    from detspec.jobs.merge import merge

    check_out(args.out, "-")
    try:
        stats = merge(Path(args.out), args.shards)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"detspec: error: cannot write {args.out}: {error.strerror}", file=sys.stderr)
        return NO_ROOM_CODE
    rejected = f", {stats['num_rejected']} lines rejected" if stats["num_rejected"] else ""
    failed = f", {stats['num_failed']} failed" if stats["num_failed"] else ""
    counts = f"{stats['num_requests']} requests, {stats['num_tokens']} tokens"
    print(f"detspec: {counts} of {stats['num_shards']} shards{rejected}{failed}", file=sys.stderr)
    return 0
