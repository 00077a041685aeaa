"""`detspec train`: one training run, which resumes after a kill."""

import argparse
from pathlib import Path

from detspec.say import say

SUMMARY = "train a small model"
DESCRIPTION = """Trains what FILE describes. A run found in the work folder is continued, to the same bits as without a break.
The weights have the same bits on 1, 2, 4 and 8 chips of a kind, and a run may be continued on another number of them.
If FILE holds several runs, ARM after a colon names one. On a CPU under Linux, the environment variable
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 makes small trainings up to 1.6 times as fast."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    add = parser.add_argument
    add(
        "--config",
        required=True,
        metavar="FILE[:ARM]",
        help="a file with get_config() or get_config(arm): configs/tiny_python.py",
    )
    add("--workdir", metavar="DIR", help="folder of checkpoints, log and export (default: runs/NAME-OF-FILE[-ARM])")
    add(
        "--chips",
        type=int,
        default=1,
        metavar="N",
        help="share out the rows of each batch among N chips: 1, 2, 4 or 8, at most as many as batches have slices",
    )
    add("--no-resume", action="store_true", help="refuse a work folder that already holds a run")


def run(args: argparse.Namespace) -> int:
    """Trains, and prints the final evaluation and where the exported model lies."""
    from detspec.train.experiment import split_source
    from detspec.train.run import train

    file, arm = split_source(args.config)
    default = Path("runs") / (file.stem if arm is None else f"{file.stem}-{arm}")
    workdir = default if args.workdir is None else Path(args.workdir)
    say(f"training {args.config} in {workdir}")
    result = train(args.config, workdir=workdir, chips=args.chips, resume=not args.no_resume)
    for name, value in result.metrics.items():
        print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:.4f}")
    print(f"model: {result.export}")
    return 0
