"""`detspec audit`: whether the records of a job are what their requests get."""

import argparse
import json
import sys
from pathlib import Path

from detspec.cli.options import add_model, add_subcommand, load_model
from detspec.errors import InputError

DESCRIPTION = """Replays every line that `detspec generate` wrote through the canonical pass, teacher-forced and many at a time,
and compares tokens, bits of all log-probabilities, reason of ending, text and digest with what the request, or its sample of
that index, gets. Names each record that differs and its first differing token. Records of ordinary requests promise nothing and
are counted apart. Reads the manifest beside the records. Exit codes: 0 all deterministic records reproduce; 1 some do not;
2 bad input."""


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "audit", "replay recorded completions bit for bit", DESCRIPTION)
    parser.add_argument("--records", required=True, metavar="OUT.jsonl", help="what `detspec generate` wrote")
    parser.add_argument(
        "--prompts",
        metavar="IN.jsonl",
        default=argparse.SUPPRESS,
        help="what it read (default: the file that the manifest names)",
    )
    parser.add_argument(
        "--max-requests", type=int, default=32, metavar="B", help="records replayed together; changes speed alone"
    )
    parser.add_argument("--json", metavar="FILE", default=argparse.SUPPRESS, help="write the report there, too")
    add_model(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0 if all deterministic records reproduce, else 1."""
    from detspec.jobs.audit import run_audit

    prompts = Path(args.prompts) if hasattr(args, "prompts") else None
    report = run_audit(load_model(args), Path(args.records), prompts=prompts, max_requests=args.max_requests)
    print(report.table())
    print(
        f"detspec: replayed {report.num_tokens} tokens in {report.replay_s:.1f} s "
        f"({report.num_tokens / report.replay_s:,.0f} tok/s)",
        file=sys.stderr,
    )
    if hasattr(args, "json"):
        try:
            Path(args.json).write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--json {args.json}: {error.strerror}") from error
        print(f"detspec: wrote {args.json}", file=sys.stderr)
    return 0 if report.reproduced else 1
