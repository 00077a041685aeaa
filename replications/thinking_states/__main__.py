#!/usr/bin/env python
"""Replicates Thinking States (arXiv 2602.08332) at small scale, from training to tables, by one command.

python scripts/replicate_thinking_states.py                 writes docs/thinking_states.{md,json,png}
python scripts/replicate_thinking_states.py --quick         the same way in a few minutes, with figures that mean nothing

What is done is kept in --workdir: a run that was interrupted goes on where it was, by the same command. The report of a trial,
or of some runs only, goes there too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from detspec.environment import enable_compile_cache
from detspec.errors import InputError
from replications.thinking_states.measure import all_runs, perform
from replications.thinking_states.pool import Run, RunFailed, run_all
from replications.thinking_states.report import write_report

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "replication.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is not done yet and writes the report; exit code 1 if a run fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", metavar="DIR", type=Path, help="of all runs (default: runs/replication, or -quick)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the report goes (default: docs, if it is the whole one)")
    parser.add_argument("--width", type=int, default=2, help="processes at a time, of one core each (default: 2)")
    parser.add_argument("--quick", action="store_true", help="everything so small that it shows only that it works")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="these runs, and those whose models they measure")
    parser.add_argument("--run", metavar="NAME", help="this one run alone, in this process, as the command starts each")
    args = parser.parse_args(argv)
    if args.width < 1:
        parser.error(f"--width must be at least 1, got {args.width}")
    workdir = args.workdir or ROOT / "runs" / ("replication-quick" if args.quick else "replication")
    if args.run:
        enable_compile_cache()
        perform(args.run, workdir=workdir, config_file=CONFIG, quick=args.quick)
        return 0

    def command(run: Run) -> list[str]:
        return [__file__, "--run", run.name, "--workdir", str(workdir), *(["--quick"] if args.quick else [])]

    try:
        runs = all_runs(quick=args.quick, only=args.only)
    except InputError as error:
        parser.error(str(error))
    with tqdm(total=len(runs), unit="run") as bar:

        def show(done: int, running: Sequence[str]) -> None:
            bar.n = done
            bar.set_postfix_str(", ".join(running))

        try:
            run_all(runs, command, workdir=workdir, width=args.width, listener=show)
        except RunFailed as error:
            bar.close()
            print(error)
            return 1
    for path in write_report(runs, workdir=workdir, out=args.out or (workdir if args.quick or args.only else ROOT / "docs")):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
