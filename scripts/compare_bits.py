"""Runs one mixed job, and compares its bits and digests between commits: a change that should move no bit shows it here.

    python scripts/compare_bits.py --at 50135f3 --workdir out/compare              that commit, then this checkout
    python scripts/compare_bits.py --at 50135f3 --at HEAD --workdir out/compare    two commits
    python scripts/compare_bits.py > before.txt                                    hashes of this checkout; after a change:
    python scripts/compare_bits.py --expect before.txt

For each part, the first hash is of tokens, log-probability bits, texts and output files; the second is of digests,
fingerprints, manifests and journals. Hashes are those of one machine. The exit status is 1 if a part differs or fails, and
such parts are named.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from compare_commits import worktree

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 16  # hexadecimal digits
WIDTH = 24  # of the names of parts
TOTAL = "total"
FAILED = "failed"  # in place of hashes
# Simulated devices are threads that wait for each other: on a busy machine longer than XLA's 40 seconds.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
Found = tuple[str, str]  # hashes of a part: of bits, of digests


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the hashes of each part, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    at = "run at this commit, too; given twice, at these two alone"
    parser.add_argument("--at", action="append", default=[], metavar="COMMIT", help=at)
    parser.add_argument("--workdir", type=Path, help="folder for a worktree of each commit; it is kept")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="compare with what an earlier run printed into this file")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts whose names begin with one of these")
    parser.add_argument("--quick", action="store_true", help="fewer parts, in a quarter of the time")
    parser.add_argument("--here", type=int, metavar="N", help=argparse.SUPPRESS)  # run by this script itself, on N devices
    args = parser.parse_args(argv)
    if args.here:
        return run_parts(args.here, args.only, args.quick)
    if bool(args.at) != (args.workdir is not None) or len(args.at) > 2:
        parser.error("give --workdir with one or two --at, and only then")
    roots = {commit: worktree(commit, args.workdir.resolve()) for commit in args.at}
    if len(args.at) < 2:
        roots["this checkout"] = ROOT
    runs = {} if args.expect is None else {str(args.expect): read(args.expect.read_text())}
    for name, root in roots.items():
        print(f"# {name}", flush=True)
        runs[name] = {}
        for part, found in run_at(root, args.only, args.quick):
            runs[name][part] = found
            print(line(part, found), flush=True)
        print(line(TOTAL, total(runs[name])), flush=True)
    *befores, after = runs.values()
    differing = [part for before in befores for part in differences(before, after)]
    failed = [part for found in runs.values() for part, hashes in found.items() if FAILED in hashes]
    for part in (part for before in befores for part in before if part not in after and not (args.only or args.quick)):
        print(f"not compared: {part}")
    for part in differing:
        print(f"differs: {part}")
    for part in failed:
        print(f"failed: {part}")
    return 1 if differing or failed else 0


def run_at(root: Path, only: Sequence[str], quick: bool) -> Iterator[tuple[str, Found]]:
    """Each part with its hashes, of the package in the folder `root`: those on one device first, then those on two."""
    choice = [*(["--only", *only] if only else []), *(["--quick"] if quick else [])]
    for number in (1, 2):
        flags = " ".join([PATIENCE] * (number > 1) + [os.environ.get("XLA_FLAGS", "")]).strip()
        changed = {"PYTHONPATH": str(root), "JAX_NUM_CPU_DEVICES": str(number), "XLA_FLAGS": flags}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(Path(__file__).resolve()), "--here", str(number), *choice]
            with subprocess.Popen(
                command, env={**os.environ, **changed}, cwd=folder, stdout=subprocess.PIPE, text=True
            ) as process:
                there = Path(json.loads(process.stdout.readline()))
                assert there.is_relative_to(root), f"{there} was imported, not {root}"
                for raw in process.stdout:
                    part, *found = json.loads(raw)
                    yield part, tuple(found)
            if process.returncode:
                raise SystemExit(f"{root}: exit code {process.returncode}, see above")


def run_parts(num_devices: int, only: Sequence[str], quick: bool) -> int:
    """Runs the parts for `num_devices` in the working folder, and prints their hashes as lines of JSON."""
    from bits_parts.parts import CHIP_PARTS, PARTS, QUICK
    from bits_parts.record import Record

    import detspec as ds

    print(json.dumps(ds.__file__), flush=True)
    for name, run in (PARTS if num_devices == 1 else CHIP_PARTS).items():
        if (not quick or name in QUICK) and (not only or name.startswith(tuple(only))):
            record = Record()
            began = time.perf_counter()
            try:
                run(record)
                found = record.found
            except Exception:  # the other parts are still worth knowing
                traceback.print_exc()
                found = (FAILED, FAILED)
            print(json.dumps([name, *found]), flush=True)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return 0


def total(found: Mapping[str, Found]) -> Found:
    """Hashes of all parts together."""
    return tuple(hashlib.sha256("".join(hashes[kind] for hashes in found.values()).encode()).hexdigest() for kind in (0, 1))


def line(part: str, found: Found) -> str:
    """A row of the table; `read` understands it."""
    return f"{part:{WIDTH}}" + "  ".join(digest[:SHOWN] for digest in found)


def read(text: str) -> dict[str, Found]:
    """The parts of a table that was printed; those of the last one, if there are several."""
    rows = text.rsplit("# ", 1)[-1].splitlines()[1:]
    named = [(row[:WIDTH].strip(), tuple(row[WIDTH:].split())) for row in rows]
    return {part: found for part, found in named if part != TOTAL and list(map(len, found)) == [SHOWN] * 2}


def differences(before: Mapping[str, Found], after: Mapping[str, Found]) -> list[str]:
    """The parts in both that differ, with what does."""
    both = [(part, before[part], after[part]) for part in before if part in after]
    kinds = enumerate(("bits", "digests"))
    return [f"{part} ({kind})" for i, kind in kinds for part, was, now in both if was[i][:SHOWN] != now[i][:SHOWN]]


if __name__ == "__main__":
    sys.exit(main())
