"""`detspec train`: one training run, resumed if it was killed."""

import argparse
from pathlib import Path

from detspec.cli.options import add_subcommand


def add_to(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = add_subcommand(
        subcommands,
        "train",
        "train a small model",
        "Trains what FILE describes; a run found in the work folder is continued.",
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="a Python file with get_config(), such as configs/tiny_python.py"
    )
    parser.add_argument(
        "--workdir", metavar="DIR", default=argparse.SUPPRESS, help="checkpoints, log, export (default: runs/NAME-OF-FILE)"
    )
    parser.add_argument("--no-resume", action="store_true", help="refuse a work folder that already holds a run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints where the exported model lies."""
    import sys

    from detspec.train.run import train

    workdir = Path(getattr(args, "workdir", Path("runs") / Path(args.config).stem))
    result = train(args.config, workdir=workdir, resume=not args.no_resume, progress=sys.stderr.isatty())
    print(f"{result.steps} steps, {result.tokens:,} tokens")
    print(f"held-out loss {result.heldout_loss:.4f} nats a token over {result.heldout_tokens:,} tokens")
    print(f"model: {result.export}")
    return 0
