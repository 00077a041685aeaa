"""`detspec merge`: joins the outputs of all shards."""

import argparse
from pathlib import Path

from detspec.say import say

SUMMARY = "join the outputs of shards"
DESCRIPTION = """Joins the outputs of `detspec generate --shard I/N`, or what workers of `--shard auto` left in
OUT.jsonl.chunks. The result has the bytes, the manifest and the rejected lines of one job without shards; statistics are added
up. Every shard must be present, finished, unchanged and from the same job. Lines that two workers did are compared; if bytes
differ, nothing is written, and the hosts, chunks and lines are named. No output appears under its name until it is whole. An
OUT.jsonl of another job is left as it is, unless --fresh says otherwise; the shards stay. Exit codes: 0 success; 2 something is
wrong with the shards; 3 the disk is full."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add = parser.add_argument
    add("--out", required=True, metavar="OUT.jsonl", help="the --out of the job")
    add("--fresh", action="store_true", help="write over an OUT.jsonl that is there already, whatever it is")
    add("shards", nargs="*", type=Path, metavar="SHARD", help="default: OUT.*-of-*.jsonl, or OUT.jsonl.chunks")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if the disk is full."""
    from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, check_out
    from detspec.jobs.merge import merge

    check_out(args.out, "-")
    say(f"joining the parts of {args.out}")
    try:
        stats = merge(Path(args.out), args.shards, fresh=args.fresh)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        say(f"error: cannot write {args.out}: {error.strerror}")
        return NO_ROOM_CODE
    rejected = f", {stats['num_rejected']} lines rejected" if stats["num_rejected"] else ""
    failed = f", {stats['num_failed']} failed" if stats["num_failed"] else ""
    counts = f"{stats['num_requests']} requests, {stats['num_tokens']} tokens"
    if "num_shards" in stats:
        say(f"{counts} of {stats['num_shards']} shards{rejected}{failed}")
    else:
        say(f"{counts} of {stats['num_workers']} workers; {stats['num_compared']} lines done twice agree{rejected}{failed}")
    return 0
