"""Runs stages in processes of their own, each with a limit. What is not done in time is killed, and the next one begins."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from prove_stages import history
from prove_stages.journal import Journal, Line
from prove_stages.stages import CUT_OFF, FAILED, Stage

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "scripts", ROOT / "tests" / "aot")
RESTART = 3  # exit status of a worker whose device no longer answers after a failed measurement
ERROR_LINES = 12  # of a stage that ended without a word
LOOK_S = 0.2

SAID = ("measurement", "skipped")  # kinds of lines
WARM_UP = "import jax.numpy as jnp; jnp.dot(jnp.ones((64, 64)), jnp.ones((64, 64))).block_until_ready()"
WARM_UP_S = 120

SayFn = Callable[[str], None]
HearFn = Callable[[Sequence[Line]], None]


def limits(stages: Sequence[Stage], seconds: float) -> Iterator[tuple[Stage, float]]:
    """Each stage with its limit: its share of what is left, so that time which one does not take is left to the others.

    Shares 20, 30, 50 of 100 s; if the first takes 10 s, the second gets 90 x 30 / 80 = 33.75 s.
    """
    ends = time.monotonic() + seconds
    for index, stage in enumerate(stages):
        left = sum(other.share_s for other in stages[index:])
        yield stage, (ends - time.monotonic()) * stage.share_s / left


def warm_up() -> str:
    """Imports jax once and multiplies, so that no stage waits for cold files; in one line how long it took."""
    began = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-c", WARM_UP], capture_output=True, text=True, timeout=WARM_UP_S)
        words = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        words = [f"no end after {WARM_UP_S} s"]
    return "; ".join([f"warming up took {time.monotonic() - began:.0f} s", *words])


def run_stage(
    stage: Stage,
    limit_s: float,
    journal: Journal,
    *,
    arguments: Sequence[str],
    run: str,
    say: SayFn,
    changed: Callable[[], None] = lambda: None,
) -> None:
    """Runs `stage`, and notes how it ended.

    A worker that ends early with `RESTART` is started again for what it has not tried. `changed` is called when the results
    have grown.
    """
    began = time.monotonic()
    log = journal.path.with_name(f"{stage.name.replace(' ', '-')}.log")
    while True:
        num_lines = len(journal.lines())
        status = _run_worker(stage, began + limit_s, journal, log, [*arguments, "--run", run], partial(_told, say, changed))
        if status != RESTART or len(journal.lines()) == num_lines:
            break
    seconds = time.monotonic() - began
    if status is None:
        journal.add("end", stage=stage.name, status=CUT_OFF, seconds=seconds, error=f"after {limit_s:.0f} s", run=run)
    elif status not in (0, RESTART) or _has_not_ended(journal, stage, run):
        error = f"status {status}: {_last_lines(log)}"
        journal.add("end", stage=stage.name, status=FAILED, seconds=seconds, error=error, run=run)


def _told(say: SayFn, changed: Callable[[], None], lines: Sequence[Line]) -> None:
    """Says what new lines say."""
    for line in lines:
        if line["kind"] in SAID:
            say(described(line))
    if lines:
        changed()


def _run_worker(stage: Stage, ends: float, journal: Journal, log: Path, arguments: Sequence[str], hear: HearFn) -> int | None:
    """The exit status of one worker, None if it was killed; hears of each line when it is there."""
    command = [sys.executable, "-m", "prove_stages.worker", stage.name, "--results", str(journal.path), *arguments]
    command += ["--began", str(time.monotonic()), "--ends", str(ends)]
    seen = len(journal.lines())
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(stage, os.environ), start_new_session=True
        )
    try:
        while True:
            ended = _wait(process, LOOK_S)
            new = journal.lines()[seen:]
            seen += len(new)
            hear(new)
            if ended:
                return process.returncode
            if time.monotonic() > ends:
                return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment(stage: Stage, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker: those `given`, the stage's own, and where our packages are."""
    paths = os.pathsep.join(filter(None, (*map(str, PATHS), given.get("PYTHONPATH", ""))))
    return {**given, **dict(stage.environment), "PYTHONPATH": paths}


def described(line: Line) -> str:
    """A measurement in one line for the terminal."""
    if line["kind"] == "skipped":
        return f"  {line['name']}: skipped, {line['note']}"
    if line["error"]:
        return f"  {line['name']}: FAILED: {line['error'].strip().splitlines()[-1]}"
    parts = [f"{entry['name']} {figure(entry)}{missed(entry)}" for entry in line["entries"]]
    return f"  {line['seconds']:5.1f} s  " + "; ".join(parts)


def missed(entry: Line) -> str:
    """Says that a figure misses its bar, and its note if it has one; "" if it holds or has no bar."""
    note = f": {entry['note']}" if entry["note"] else ""
    return f" (misses its bar{note})" if entry["holds"] is False else ""


def figure(entry: Line, field: str = "value") -> str:
    """The value of an entry with its unit, or its prediction: "12.3 us", "0.81", "yes"; "" if there is none."""
    value = entry.get(field)
    if value is None:
        return ""
    if entry["unit"] == "yes or no":
        return "yes" if value else "no"
    text = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return f"{text} {entry['unit']}".strip()


def _wait(process: subprocess.Popen, seconds: float) -> bool:
    """Whether the process ends within `seconds`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def _has_not_ended(journal: Journal, stage: Stage, run: str) -> bool:
    """Whether the worker left no word on its end."""
    end = history.last_end(journal.lines(), stage.name)
    return end is None or end["run"] != run


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-ERROR_LINES:])
