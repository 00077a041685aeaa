"""Compares a million committed tokens over every axis that must not matter, and kills jobs a thousand times.

    nice -n 19 python -m scripts.soak --workdir out/soak --tokens 1000000 --kills 1000

Two parts run at the same time. One draws engines and requests (`engine_trials.py`), the other kills batch jobs
(`job_trials.py`). Each appends a line to its journal in the work folder when a trial has ended, so the same command goes on
after a kill. Trial `i` draws from the seed and `i` alone. The exit code is 0 if everything is as expected.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detspec.progress import Progress
from scripts.soak.devices import be_patient, simulate
from scripts.soak.record import Journal, num_kills, num_tokens
from scripts.soak.report import KILLS, TOKENS, report, tables, write
from scripts.soak.sizes import SIZES

NUM_DEVICES = 4
DOCS = Path(__file__).parents[2] / "docs"
PARTS = ("engines", "jobs")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both parts, or the one that is named, until there are enough tokens and kills; prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="folder for journals and compiled programs; it is kept")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="committed tokens to compare in engines; jobs add to them")
    parser.add_argument("--kills", type=int, default=KILLS, help="processes to kill")
    parser.add_argument("--kills-per-job", type=int, default=12, help="most kills of one job")
    parser.add_argument("--seed", type=int, default=0, help="what all trials are drawn from")
    parser.add_argument("--size", choices=SIZES, default="full", help="how many models, requests and engines there are")
    parser.add_argument("--part", choices=PARTS, help="run this part alone")
    parser.add_argument("--report", action="store_true", help="run nothing, and show what is in the journals")
    parser.add_argument(
        "--write-docs", action="store_true", help="also write docs/data/soak.json and the tables of docs/soak.md"
    )
    args = parser.parse_args(argv)
    args.workdir.mkdir(parents=True, exist_ok=True)
    simulate(NUM_DEVICES)
    if args.part:
        return run_part(args)
    if not args.report:
        command = [sys.executable, "-m", "scripts.soak", *(sys.argv[1:] if argv is None else argv), "--part"]
        parts = [subprocess.Popen([*command, part]) for part in PARTS]
        if failed := [part for part, process in zip(PARTS, parts, strict=True) if process.wait()]:
            print(f"not as expected, or not at its end: {', '.join(failed)}")
    found = report(args.workdir)
    print(tables(found))
    if args.write_docs:
        write(found, DOCS)
    reached = found["tokens"]["engines"] >= args.tokens and found["jobs"]["killed"] >= args.kills
    verdict = "all trials as expected" if found["sound"] else "NOT AS EXPECTED"
    print(verdict if reached else f"{verdict}; the same command goes on")
    return 0 if found["sound"] and reached else 1


def run_part(args: argparse.Namespace) -> int:
    """Runs trials of one part until it has enough; returns 1 if one was not as expected."""
    journal = Journal(args.workdir / f"{args.part}.jsonl", appends=True)
    trials = make_trials(args)
    journal.started(args.seed, trials.fingerprint)
    count_fn, goal = {"engines": (num_tokens, args.tokens), "jobs": (num_kills, args.kills)}[args.part]
    done = count_fn(journal.trials)
    with Progress(goal, {"engines": "tokens", "jobs": "kills"}[args.part], done=done) as progress:
        progress.stage(args.part)
        while done < goal:
            number = len(journal.trials)
            began = time.perf_counter()
            facts = trials.run(random.Random(f"{args.seed}/{args.part}/{number}"))
            entry = {"trial": number, **facts, "seconds": round(time.perf_counter() - began, 1)}
            journal.add(entry)
            if not entry["as_expected"]:
                progress.print(f"NOT AS EXPECTED: {entry}")
            more = min(count_fn([entry]), goal - done)
            progress.finished(more)
            done += more
            progress.segment(entry["tokens"], 0)
    return 0 if all(entry["as_expected"] for entry in journal.trials) else 1


def make_trials(args: argparse.Namespace) -> Any:
    """Returns the function that runs the trials of a part; modules that take a device are imported in the part that may."""
    folder = args.workdir.resolve()
    size = SIZES[args.size]
    if args.part == "engines":
        be_patient()
        from scripts.soak.engine_trials import EngineTrials

        return EngineTrials(folder, args.seed, size)
    from scripts.soak.job_trials import JobTrials
    from scripts.soak.jobs import some_jobs
    from scripts.soak.killing import OPTIONS

    return JobTrials(folder, some_jobs(folder, size), args.kills_per_job, OPTIONS[: size.num_options])


if __name__ == "__main__":
    sys.exit(main())
