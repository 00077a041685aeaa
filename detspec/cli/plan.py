"""`detspec plan`: memory and speed of a model on a TPU or GPU that is not at hand."""

import argparse
import json
import sys
from pathlib import Path

from detspec.cli.options import MAX_LEN, add_subcommand

DESCRIPTION = """Compiles the draft step and the canonical pass of a model for a TPU or GPU, with the vendor's compiler and
without the device, and prints what they need of its memory, the least time they can take by their bytes and operations, and
the rates to expect from that. Plans for one device of the slice. Needs pip install 'detspec[aot]'."""


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(subcommands, "plan", "predict memory and speed on a device that is not here", DESCRIPTION)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", metavar="NAME", default=argparse.SUPPRESS, help="a published shape, e.g. qwen3_8b")
    model.add_argument("--model", metavar="DIR", default=argparse.SUPPRESS, help="a model folder; only its config is read")
    parser.add_argument(
        "--target", metavar="NAME", required=True, help="e.g. v5e:2x2, v6e:2x2, h100, h200; a wrong one lists all"
    )
    parser.add_argument("--max-requests", type=int, default=32, metavar="B", help="most requests in flight")
    parser.add_argument("--max-len", type=int, default=MAX_LEN, metavar="S", help="tokens of each, prompt included")
    parser.add_argument(
        "--window", type=int, default=argparse.SUPPRESS, metavar="W", help="tokens verified together (default: the target's)"
    )
    parser.add_argument(
        "--group",
        type=int,
        default=argparse.SUPPRESS,
        metavar="G",
        help="windows of a canonical pass (default: to fill its rows)",
    )
    parser.add_argument("--json", metavar="FILE", default=argparse.SUPPRESS, help="write all numbers there, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    import jax

    from detspec.checkpoint.load import load_config
    from detspec.planning.planning import plan, plan_table
    from detspec.presets import preset
    from detspec.progress import Progress
    from detspec.targets import canonical_schedule, target

    jax.config.update("jax_platforms", "cpu")  # compiling needs no device: leave those that there are to others
    device = target(args.target)
    cfg = preset(args.preset) if hasattr(args, "preset") else load_config(args.model)
    split = {"window": getattr(args, "window", None), "groups": getattr(args, "group", None)}
    schedule = canonical_schedule(device, cfg, **split)
    with Progress(2, "programs") as progress:
        result = plan(
            cfg, device, schedule=schedule, max_requests=args.max_requests, max_len=args.max_len, on_stage=progress.next_stage
        )
    print(plan_table(result))
    if hasattr(args, "json"):
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"detspec: wrote {args.json}", file=sys.stderr)
    return 0
