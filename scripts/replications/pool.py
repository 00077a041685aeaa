"""Runs as processes, of one core each or alone. Results are kept, so that a pool that was stopped continues."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from detspec.environment import fingerprint

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# Each step allocates its temporaries again: with pages of 4 KiB 42,000 page faults, 40 % of a small training step.
HUGE_PAGES = "glibc.malloc.hugetlb=1"
RESULT, OUTPUT = "result.json", "output.txt"
POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Run:
    """A process.

    Attributes:
        name: the name of the run and of its folder.
        needs: runs whose results it reads.
        alone: it measures time, so it runs last and by itself.
        one_thread: XLA's products run on one core.
    """

    name: str
    needs: tuple[str, ...] = ()
    alone: bool = False
    one_thread: bool = True


class RunFailed(RuntimeError):
    """A process ended without a result."""


def run_all(
    runs: Sequence[Run],
    command: Callable[[Run], Sequence[str]],
    *,
    workdir: Path,
    width: int,
    listener: Callable[[int, Sequence[str]], None],
) -> None:
    """Runs all of `runs` that have no result in `workdir` yet, up to `width` at a time.

    Args:
        runs: in the order they should begin.
        command: arguments for Python; the process leaves `workdir/NAME/result.json`.
        workdir: holds a folder for each run, with its output.
        width: processes at a time, each on a core of its own where the system allows it.
        listener: called with the number of finished runs and the names of running ones, whenever they change.

    Raises:
        RunFailed: a process failed; the others are ended.
    """
    waiting = [run for run in runs if not (workdir / run.name / RESULT).exists()]
    done = {run.name for run in runs} - {run.name for run in waiting}
    running: dict[int, tuple[Run, subprocess.Popen[bytes]]] = {}
    told: list[str] | None = None
    try:
        while waiting or running:
            while run := _next(waiting, done, [run for run, _ in running.values()], width):
                slot = next(slot for slot in range(width) if slot not in running)
                waiting.remove(run)
                running[slot] = run, _start(run, command(run), workdir / run.name, None if run.alone else slot)
            if told != (names := [run.name for run, _ in running.values()]):
                listener(len(done), names)
                told = names
            time.sleep(POLL_S)
            for slot, (run, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    _require_result(run, process.returncode, workdir / run.name)
                    done.add(run.name)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    listener(len(done), [])


def run_shown(runs: Sequence[Run], command: Callable[[Run], Sequence[str]], *, workdir: Path, width: int) -> bool:
    """`run_all` with a progress bar; prints what failed. Returns whether all runs have results.

    Ctrl-C and SIGTERM end the processes that run.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tqdm(total=len(runs), unit="run") as bar:

        def show(done: int, running: Sequence[str]) -> None:
            bar.n = done
            bar.set_postfix_str(", ".join(running))

        try:
            run_all(runs, command, workdir=workdir, width=width, listener=show)
        except RunFailed as error:
            bar.close()
            print(error)
            return False
        except KeyboardInterrupt:
            bar.close()
            print("stopped; the same command continues")
            return False
    return True


def keep_result(folder: Path, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
    """Calls `make()` and writes its result into `folder`, with what it took and the fingerprint of the machine."""
    began = time.perf_counter()
    cpu_began = time.process_time()
    result = make()
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
    write_result(folder, {"name": name, **took, "fingerprint": fingerprint(), **result})


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes the result of the run in `folder` atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "result.tmp"
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / RESULT)


def read_result(folder: Path) -> dict[str, Any]:
    """The result of the run in `folder`."""
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))


def _next(waiting: Sequence[Run], done: set[str], running: Sequence[Run], width: int) -> Run | None:
    """The first run that may begin now."""
    if len(running) >= width or any(run.alone for run in running):
        return None
    for run in waiting:
        last = not run.alone or (not running and all(other.alone for other in waiting))
        if last and done.issuperset(run.needs):
            return run
    return None


def _start(run: Run, command: Sequence[str], folder: Path, slot: int | None) -> subprocess.Popen[bytes]:
    """Starts a process on the core of `slot`; without a slot it runs alone, on all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD if run.one_thread else ''}".strip()
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), HUGE_PAGES)))
    env = {**os.environ, "XLA_FLAGS": flags, "GLIBC_TUNABLES": tunables}
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=env)
    if slot is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[slot % len(cores)]})
    return process


def _require_result(run: Run, returncode: int, folder: Path) -> None:
    if returncode or not (folder / RESULT).exists():
        tail = "\n".join((folder / OUTPUT).read_text(errors="replace").splitlines()[-15:])
        raise RunFailed(f"{run.name} ended with exit code {returncode}; the end of {folder / OUTPUT}:\n{tail}")
