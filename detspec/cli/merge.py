"""`detspec merge`: the outputs of all shards as one."""

import argparse
import sys
from pathlib import Path

from detspec.cli.options import add_subcommand

DESCRIPTION = """Puts the outputs of `detspec generate --shard I/N` together: the bytes, the manifest and the rejected lines of
one job without shards, and the sums of the statistics. Every shard must be there, finished, unchanged and of the same job.
Nothing appears under its name unless it is whole; an OUT.jsonl that is there is overwritten, the shards stay. Exit codes: 0
success; 2 something is wrong with the shards; 3 the disk is full."""


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "merge", "put the outputs of shards together", DESCRIPTION)
    parser.add_argument("--out", required=True, metavar="OUT.jsonl", help="what the job was told to write")
    parser.add_argument(
        "shards", nargs="*", type=Path, metavar="SHARD", default=argparse.SUPPRESS, help="default: OUT.*-of-*.jsonl"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if the disk is full."""
    from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, check_out
    from detspec.jobs.merge import merge

    check_out(args.out, "-")
    try:
        stats = merge(Path(args.out), getattr(args, "shards", ()))
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
