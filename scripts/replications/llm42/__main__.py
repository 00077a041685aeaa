"""Repeats the figures of LLM-42 (arXiv 2601.17768) in ratio form at small scale, by one command.

python -m scripts.replications.llm42                    writes docs/llm42.{md,png} and docs/data/llm42.json
python -m scripts.replications.llm42 --size tiny        the same steps in a minute; the figures mean nothing

Start it in the root of the repository, on a machine with nothing else to do. Finished measurements are kept in --workdir: after
an interruption the same command continues. The report of a tiny run or of --only goes to --workdir too. The exit code is 1 if a
measurement fails, or a deterministic request gave two results.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from detspec.compile_cache import enable_jax_cache
from detspec.errors import InputError
from scripts.replications.llm42.measure import SIZES, all_runs, perform
from scripts.replications.llm42.report import write_report
from scripts.replications.pool import Run, run_shown

ROOT = Path(__file__).resolve().parents[3]


def main(argv: Sequence[str] | None = None) -> int:
    """Takes the measurements that are missing and writes the report."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.replications.llm42", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny shows only that everything works")
    parser.add_argument("--workdir", metavar="DIR", type=Path, help="folder of results (default: runs/llm42-SIZE)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default: docs, if it is complete)")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="these measurements; the report shows no others")
    parser.add_argument("--run", metavar="NAME", help="this one, in this process; the command starts each so")
    args = parser.parse_args(argv)
    workdir = args.workdir or ROOT / "runs" / f"llm42-{args.size}"
    if args.run:
        enable_jax_cache()
        perform(args.run, workdir=workdir, size=args.size)
        return 0

    def command(run: Run) -> list[str]:
        return ["-m", "scripts.replications.llm42", "--run", run.name, "--workdir", str(workdir), "--size", args.size]

    try:
        runs = all_runs(args.only)
    except InputError as error:
        parser.error(str(error))
    if not run_shown(runs, command, workdir=workdir, width=1):
        return 1
    is_whole = args.size == "full" and not args.only
    paths, is_reproducible = write_report(runs, workdir=workdir, out=args.out or (ROOT / "docs" if is_whole else workdir))
    for path in paths:
        print(path)
    if not is_reproducible:
        print("a deterministic request gave two results: see the bits in the report")
    return 0 if is_reproducible else 1


if __name__ == "__main__":
    raise SystemExit(main())
