"""A job of `detspec generate`, started again and again until it is whole.

Each start draws options that must not matter, and what happens to it: a signal at a moment that is measured in completions, or
room on the disk for a few bytes more. What the journal held before a start must be in it afterwards.
"""

import dataclasses
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detspec.jobs.files import journal_path
from scripts.soak.disk import Disk
from scripts.soak.processes import POLL_S, Process, Start, UnexpectedError
from scripts.soak.tampering import one_byte_flipped

Options = tuple[str, ...]

OPTIONS: tuple[Options, ...] = (
    ("--max-requests", "1", "--method", "none"),
    ("--max-requests", "3", "--method", "none"),
    ("--max-requests", "8"),
    ("--max-requests", "8", "--method", "self", "--num-speculative-tokens", "7"),
    ("--max-requests", "4", "--method", "ngram", "--num-speculative-tokens", "3"),
    ("--max-requests", "8", "--method", "int8", "--num-speculative-tokens", "3"),
    ("--max-requests", "16", "--method", "none", "--num-pages", "18"),
    ("--max-requests", "3", "--no-prefix-sharing"),
    ("--max-requests", "8", "--method", "none", "--chips", "2"),
    ("--max-requests", "3", "--method", "none", "--chips", "4"),
)
ORDINARY: tuple[Options, ...] = (("--max-requests", "8", "--ordinary"),)
STARTING, RUNNING, ENDING = "starting", "running", "ending"
MOMENTS = {STARTING: 0.45, RUNNING: 0.45, ENDING: 0.1}
EXIT_CODES = {signal.SIGKILL: (-9,), signal.SIGTERM: (143, -15)}  # -15 before the handler is there
NO_ROOM_CODE = 3
BAD_INPUT = 2
# Shares of starts.
DISKS_FILL = 0.1
CLOCKS_JUMP = 0.25
START_ANEW = 0.1
COMPILE_ANEW = 0.01
USE_CHIPS = 0.08
TAMPERED = 0.05


@dataclasses.dataclass
class Tally:
    """Events of a job so far; each control has how often it found what was put in, and how often something was."""

    starts: int = 0
    kills: Counter[str] = dataclasses.field(default_factory=Counter)  # by signal and moment
    options: Counter[str] = dataclasses.field(default_factory=Counter)
    full_disks: int = 0
    wrong_clocks: int = 0
    started_anew: int = 0
    compiled_anew: int = 0
    lost: int = 0  # lines of a journal that a later start no longer had
    controls: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """All of it, as plain values."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in found.items()}

    def control(self, name: str, *, found: bool) -> None:
        """Notes a control."""
        entry = self.controls.setdefault(name, [0, 0])
        entry[0] += found
        entry[1] += 1


@dataclasses.dataclass
class Pace:
    """How long starts take here: seconds to the first completion, as last seen."""

    starting_s: float = 1.0


class Killed:
    """A job on its way, with one shard of its lines.

    Attributes:
        tally: what happened.
    """

    def __init__(self, command: tuple[str, ...], out: Path, total: int, disk: Disk, cache: Path, pace: Pace) -> None:
        """`command` is to write `total` completions to `out`; programs are in `cache`, `pace` is of all jobs."""
        self.tally = Tally()
        self._pace = pace
        self._command = command
        self._out = out
        self._journal = journal_path(out)
        self._total = total
        self._disk = disk
        self._cache = cache

    def to_the_end(self, rng: random.Random, kills: int, options: Sequence[Options]) -> None:
        """Starts it until it is whole, each time with some of `options`, at first with `kills` signals and some full disks."""
        while kills:
            held = self._held()
            if len(held) > 2 and rng.random() < TAMPERED:
                self.tally.control("flipped byte in a journal", found=self._refuses(rng, options))
            if rng.random() < DISKS_FILL:
                ended = self._on_full_disk(rng, options)
            else:
                ended = self._signalled(rng, options, kills)
                kills -= not ended
            if ended:
                return
            self.tally.lost += self._num_lost(held)
        self._start(rng, options).succeed()

    def _signalled(self, rng: random.Random, options: Sequence[Options], kills: int) -> bool:
        """Sends a signal at a random moment; whether the job had ended before."""
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        [moment] = rng.choices(list(MOMENTS), list(MOMENTS.values()))
        process = self._start(rng, options)
        self._wait(moment, rng, process, kills)
        process.send(number)
        code = process.wait()
        if code not in (0, *EXIT_CODES[number]):
            raise UnexpectedError(f"exit code {code} after {number.name} while {moment}:\n{process.said}")
        if code:
            self.tally.kills[f"{number.name} {moment}"] += 1
        return code == 0

    def _on_full_disk(self, rng: random.Random, options: Sequence[Options]) -> bool:
        """Leaves room for less than is missing; whether the job has ended nevertheless."""
        room = rng.randrange(4000)
        if self._disk.is_mounted:
            self._disk.leave(room)
            process = self._start(rng, options)
        else:
            size = self._journal.stat().st_size if self._journal.exists() else 0
            process = self._start(rng, options, file_bytes=size + room)
        code = process.wait()
        self._disk.leave(None)
        if code not in (0, NO_ROOM_CODE):
            raise UnexpectedError(f"exit code {code} on a full disk:\n{process.said}")
        self.tally.full_disks += code == NO_ROOM_CODE
        return code == 0

    def _refuses(self, rng: random.Random, options: Sequence[Options]) -> bool:
        """Whether a start refuses a journal with a flipped byte, which is then put right."""
        raw = self._journal.read_bytes()
        self._journal.write_bytes(one_byte_flipped(raw, rng, before=raw[: raw.rindex(b"\n")].rindex(b"\n")))
        process = self._start(rng, options)
        refused = process.wait() == BAD_INPUT and "damaged" in process.said
        self._journal.write_bytes(raw)
        return refused

    def _start(self, rng: random.Random, options: Sequence[Options], file_bytes: int | None = None) -> Process:
        """A process that goes on with the job."""
        chosen = rng.choice([each for each in options if "--chips" not in each or rng.random() < USE_CHIPS])
        anew = rng.random() < START_ANEW
        clock_seed = rng.randrange(2**32) if not anew and rng.random() < CLOCKS_JUMP else None
        compiles = rng.random() < COMPILE_ANEW
        cache = self._disk.folder / f"cache{self.tally.starts}" if compiles else self._cache
        self.tally.starts += 1
        self.tally.options[" ".join(chosen)] += 1
        self.tally.wrong_clocks += clock_seed is not None
        self.tally.started_anew += anew
        self.tally.compiled_anew += compiles
        start = Start((*self._command, *chosen), cache, compiles, not anew, clock_seed, file_bytes)
        return Process.of(start)

    def _wait(self, moment: str, rng: random.Random, process: Process, kills: int) -> None:
        """Waits for the moment, or until the process has ended."""
        began = time.perf_counter()
        held = len(self._held())
        if moment == STARTING:
            until = began + rng.uniform(0.0, self._pace.starting_s)
            while process.code() is None and time.perf_counter() < until:
                time.sleep(POLL_S)
            return
        missing = self._total - held
        wanted = held + (missing if moment == ENDING else min(missing, 1 + int(rng.expovariate(1.0) * missing / (kills + 1))))
        has_begun = False
        while process.code() is None and (now := len(self._held())) < wanted:
            if now > held and not has_begun:
                has_begun = True
                self._pace.starting_s = time.perf_counter() - began
            time.sleep(POLL_S)
        time.sleep(rng.uniform(0.0, 0.03))

    def _num_lost(self, before: list[bytes]) -> int:
        """How many of the lines that the journal held are no longer there; a whole output has them all."""
        is_whole = self._out.exists() and not self._journal.exists()
        return 0 if is_whole else len(set(before) - set(self._held()))

    def _held(self) -> list[bytes]:
        """Whole lines of the journal after its header."""
        try:
            raw = self._journal.read_bytes()
        except FileNotFoundError:
            return []
        return raw[: raw.rfind(b"\n") + 1].splitlines()[1:]
