#!/usr/bin/env python
"""Measures on a GPU or TPU, in a few minutes, what is claimed of it: a process for each stage, the most valuable stage first.

Each figure is on disk before the next one is measured. A stage that does not end in its share of the time is killed, and one
that fails is a result, too. Started again with the same --out, it goes on: what succeeded is not measured again. Results of
other code are measured again where their stage is not done or is named by --stages.

    python scripts/prove_on_device.py --out out/prove --minutes 11
    python scripts/prove_on_device.py --out out/prove --minutes 3 --deliver kept --stages environment ceilings kernels
    python scripts/prove_on_device.py --out out/prove --minutes 8 --deliver kept2 --earlier kept     # on another machine
    python scripts/prove_on_device.py --out out/reference --implementation reference                 # where kernels fail
    python scripts/prove_on_device.py --out out/rehearsal --size tiny        # a rehearsal on a CPU
    python scripts/prove_on_device.py --plan h100                            # how long each stage should take, and why;
                                                                             # with --stages those alone
    python scripts/prove_on_device.py --out out/prove --write-docs           # their table, in docs/measured_devices.md
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from prove_stages import cache_file, children, docs, history, packages, plan, tables  # noqa: E402
from prove_stages.delivery import PROGRAMS, RESULTS, Delivery  # noqa: E402
from prove_stages.journal import Journal  # noqa: E402
from prove_stages.stages import FAILED, NOT_HERE, STAGES, UNUSABLE, Stage, stage_of  # noqa: E402

from detspec.choices import IMPLEMENTATIONS, LINEARS  # noqa: E402

SWITCHES = ("implementation", "linear")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is left of the stages and prints the table; 1 if something failed, was cut off or is below its bar."""
    args = parse(argv)
    if args.plan:
        print(plan.table(args.plan, [stage_of(name) for name in args.stages or names_of(STAGES)]))
        return 0
    journal = Journal(args.out / RESULTS)
    if args.write_docs:
        docs.write(journal.lines(), ROOT / "docs")
        return 0
    prepare(args)
    delivery = Delivery(args.out, args.deliver)
    chosen = args.stages or history.unfinished(journal.lines())
    try:
        run_stages([stage_of(name) for name in chosen], args, journal, delivery)
    finally:  # also where the script is ended from outside
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        delivery.all(wait=True)
    print(f"\n{tables.page(journal.lines())}")
    return int(not tables.all_holds(journal.lines(), args.stages or names_of(STAGES)))


def names_of(stages: Sequence[Stage]) -> list[str]:
    """Their names."""
    return [stage.name for stage in stages]


def run_stages(stages: Sequence[Stage], args: argparse.Namespace, journal: Journal, delivery: Delivery) -> None:
    """Runs one after the other, each in its share of the time; those that do not apply here are noted as such."""
    say = partial(print, flush=True)
    say(children.warm_up())
    began = time.monotonic()
    run = f"{time.time():.0f}-{os.getpid()}"
    arguments = ["--size", args.size]
    for name in SWITCHES:
        arguments += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    for stage, limit_s in children.limits(stages, 60 * args.minutes):
        say(f"[{time.monotonic() - began:5.0f} s] {stage.name}: {stage.proves}; at most {limit_s:.0f} s")
        if error := not_here(stage, history.machine(journal.lines()).get("platform", "")):
            journal.add("end", stage=stage.name, status=NOT_HERE, seconds=0.0, error=error, run=run)
        else:
            children.run_stage(stage, limit_s, journal, arguments=arguments, run=run, say=say, changed=delivery.results)
        end = history.last_end(journal.lines(), stage.name)
        say(f"[{time.monotonic() - began:5.0f} s] {tables.ended(end)}")
        delivery.all()
        if end is not None and end["status"] in ((UNUSABLE, FAILED) if stage.gate else (UNUSABLE,)):
            say("nothing else is measured in this run")
            return


def not_here(stage: Stage, platform: str) -> str:
    """Why a stage does not apply on this `platform`, "" where it does; the platform is "" before any stage has run."""
    if platform and platform not in stage.platforms:
        return f"it is for {', '.join(stage.platforms)}, this is {platform}"
    lacking = packages.missing(stage.packages)
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keeps results, logs and compiled programs")
    parser.add_argument("--minutes", type=float, default=11.0, metavar="N", help="all stages together (default: 11)")
    parser.add_argument(
        "--size", choices=("tiny", "full"), default="full", help="full: an 8B shape; tiny: a rehearsal on a CPU"
    )
    names = names_of(STAGES)
    parser.add_argument("--stages", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, help="attention and pinned products instead of the device's own"
    )
    parser.add_argument("--linear", choices=LINEARS, help="canonical products instead of the device's own")
    parser.add_argument(
        "--deliver",
        type=Path,
        metavar="DIR",
        help="keep results, table, logs and at most 16 MiB of compiled programs in this folder, too, as four whole files",
    )
    parser.add_argument("--earlier", type=Path, metavar="DIR", help="go on from what another machine delivered in this folder")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="install the wheels in this folder into --out, without an index"
    )
    parser.add_argument(
        "--plan", metavar="TARGET", choices=plan.targets(), help=f"print the plan for {' or '.join(plan.targets())}"
    )
    parser.add_argument("--write-docs", action="store_true", help="write the results in --out to docs/, instead of running")
    args = parser.parse_args(argv)
    if args.out is None and not args.plan:
        parser.error("--out is needed, except with --plan")
    if not 0 < args.minutes < float("inf"):
        parser.error(f"--minutes must be more than 0 and finite, got {args.minutes:g}")
    if args.wheels and not args.wheels.is_dir():
        parser.error(f"--wheels must be a folder, got {args.wheels}")
    if args.earlier and not (args.earlier / RESULTS).is_file():
        parser.error(f"--earlier must be a folder that --deliver filled: there is no {RESULTS} in {args.earlier}")
    for name in ("out", "deliver", "earlier"):
        if (folder := getattr(args, name)) is not None:
            setattr(args, name, folder.absolute())
    if args.deliver is not None and args.deliver == args.out:
        parser.error("--deliver must be another folder than --out")
    return args


def prepare(args: argparse.Namespace) -> None:
    """Installs wheels, names what is missing, and takes over earlier results and compiled programs."""
    target = args.out / "packages"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        packages.install(args.wheels, target)
    if lacking := packages.missing():
        sys.exit(f"prove_on_device: missing packages: {', '.join(lacking)}; bring them as wheels: --wheels DIR")
    if lacking := packages.missing(packages.OPTIONAL):
        print(f"not installed, and not needed: {', '.join(lacking)}")
    packages.name_checkout(ROOT, target)
    programs = args.out / "programs"
    programs.mkdir(mode=0o700, exist_ok=True)
    if args.earlier and (args.out / RESULTS).exists():
        print(f"{args.earlier}: not read, {args.out} has results of its own")
    elif args.earlier:
        shutil.copyfile(args.earlier / RESULTS, args.out / RESULTS)
        print(f"{args.earlier}: {cache_file.unpack(args.earlier / PROGRAMS, programs)} compiled programs, and results")
    for name in ("DETSPEC_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        os.environ.setdefault(name, str(programs))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stage does not outlive the script
    sys.exit(main())
