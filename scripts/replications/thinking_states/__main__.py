"""Repeats Thinking States (arXiv 2602.08332) at small scale, from training to tables, by one command.

python -m scripts.replications.thinking_states            writes results.{md,json,png} into the folder of this file
python -m scripts.replications.thinking_states --quick    the same steps in a few minutes; the figures mean nothing

Start it in the root of the repository. Finished runs are kept in --workdir: after an interruption the same command continues.
The report of --quick or --only goes to --workdir too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from detspec.compile_cache import enable_jax_cache
from detspec.errors import InputError
from scripts.replications.pool import Run, run_shown
from scripts.replications.thinking_states.measure import all_runs, perform
from scripts.replications.thinking_states.report import write_report

HERE = Path(__file__).resolve().parent
RUNS = HERE.parents[2] / "runs"


def main(argv: Sequence[str] | None = None) -> int:
    """Executes the runs that are not done yet and writes the report; exit code 1 if a run fails."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.replications.thinking_states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", metavar="DIR", type=Path, help="folder of all runs (default: runs/replication, or -quick)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default: this one, if it is complete)")
    parser.add_argument("--width", type=int, default=2, help="processes at a time, each on one core (default: 2)")
    parser.add_argument("--quick", action="store_true", help="tiny trainings and measurements, to see that everything works")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="these runs, and those whose models they measure")
    parser.add_argument("--run", metavar="NAME", help="this one run, in this process; the command starts each run so")
    args = parser.parse_args(argv)
    if args.width < 1:
        parser.error(f"--width must be at least 1, got {args.width}")
    workdir = args.workdir or RUNS / ("replication-quick" if args.quick else "replication")
    if args.run:
        enable_jax_cache()
        perform(args.run, workdir=workdir, quick=args.quick)
        return 0

    def command(run: Run) -> list[str]:
        module = ["-m", "scripts.replications.thinking_states"]
        return [*module, "--run", run.name, "--workdir", str(workdir), *(["--quick"] if args.quick else [])]

    try:
        runs = all_runs(quick=args.quick, only=args.only)
    except InputError as error:
        parser.error(str(error))
    if not run_shown(runs, command, workdir=workdir, width=args.width):
        return 1
    whole = not args.quick and not args.only
    for path in write_report(runs, workdir=workdir, out=args.out or (HERE if whole else workdir)):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
