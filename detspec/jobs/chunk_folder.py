"""The folder in which workers without fixed shards meet: `out.jsonl` -> `out.jsonl.chunks/`.

    job.json  scan.16.npz  rejects.jsonl  what the job is; who comes first writes it, and others would write the same
    0000012.0  0000012.1                  claims of chunk 12, in their order: a worker's name, made by exclusive creation
    0000012.done                          all its lines are in journals of the workers it names
    0000012.check0  0000012.checked       the same of doing it once more, to compare
    HOST-PID-TAG.journal  .alive  .stats.json     a worker's completions, its heartbeat, its statistics

No lock has to be right: results have the same bytes, so a chunk may be done twice. Heartbeats are compared by the clock of the
file system alone, since the clocks of hosts differ.
"""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from detspec.errors import InputError

NAME = re.compile(r"(\d{7})\.(\d+|done|check\d+|checked)")
UNNAMED = re.compile(r"[^A-Za-z0-9.]+")
BEAT_S = 5.0
STALE_S = 60.0  # a heartbeat that is older belongs to a worker that was killed or frozen


class WorkerClock:
    """Time as a worker sees it; tests put another one in its place."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def stamp(self, path: Path) -> float:
        """Writes to `path`, and returns when that was by the clock of its file system, seconds."""
        with path.open("wb") as file:
            file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
        return path.stat().st_mtime


@dataclasses.dataclass(frozen=True)
class Claim:
    """A worker's word that it does a chunk.

    Attributes:
        worker: name of the worker; "" if the claim cannot be read yet.
        start: byte of the worker's journal after which the lines of the chunk come.
        is_live: the worker's heartbeat is young.
    """

    worker: str
    start: int
    is_live: bool


class ChunkTask(NamedTuple):
    """A chunk to do, or one that is done to do once more, to compare."""

    chunk: int
    is_check: bool = False

    def claimed(self, attempt: int) -> str:
        """The name of the file that claims it."""
        return f"{self.chunk:07}.{'check' if self.is_check else ''}{attempt}"

    @property
    def done(self) -> str:
        """The name of the file that says who did it."""
        return f"{self.chunk:07}.{'checked' if self.is_check else 'done'}"


@dataclasses.dataclass(frozen=True)
class View:
    """The state of a folder as a worker sees it.

    Attributes:
        done: tasks whose lines are all there.
        claims: claims of tasks that are not done.
        live: names of workers whose heartbeat is young.
    """

    done: set[ChunkTask]
    claims: dict[ChunkTask, tuple[Claim, ...]]
    live: frozenset[str]


class ChunkFolder:
    """The folder as one worker uses it.

    Attributes:
        path: the folder.
        worker: this worker's name.
    """

    def __init__(self, path: Path, worker: str, *, clock: WorkerClock | None = None, stale_s: float = STALE_S) -> None:
        """The folder at `path`, made if missing; nothing is written yet."""
        self.path = path
        self.worker = worker
        self.clock = clock or WorkerClock()
        self._stale_s = stale_s
        self._claims: dict[str, tuple[str, int]] = {}  # claims by name; they never change
        self._authors: dict[ChunkTask, list[str]] = {}  # authors of tasks that are done
        self._stamped = 0.0  # the last heartbeat by the file system's clock
        self._beaten = self.clock.now()  # and by this process's
        path.mkdir(exist_ok=True)

    def file(self, suffix: str, worker: str | None = None) -> Path:
        """A file of this worker, or another one: "journal", "alive" or "stats.json"."""
        return self.path / f"{worker or self.worker}.{suffix}"

    def beat(self) -> None:
        """Shows that this worker lives."""
        self._stamped = self.clock.stamp(self.file("alive"))
        self._beaten = self.clock.now()

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Shows that this worker lives, from a thread, since a pass or a compilation may take minutes.

        At the end the heartbeat is taken away, so that others take this worker's chunks at once.
        """
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(BEAT_S):
                with contextlib.suppress(OSError):  # others will take its chunks, which costs time alone
                    self.beat()

        thread = threading.Thread(target=run, name="heartbeat", daemon=True)
        self.beat()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(OSError):
                self.file("alive").unlink(missing_ok=True)

    def claim(self, task: ChunkTask, attempt: int, start: int) -> bool:
        """Whether this worker is the one that made claim number `attempt` of `task`."""
        try:
            with (self.path / task.claimed(attempt)).open("xb") as file:
                file.write(json.dumps({"worker": self.worker, "start": start}).encode())
        except FileExistsError:
            return False
        return True

    def finish(self, task: ChunkTask, workers: Sequence[str]) -> None:
        """Says that all lines of `task` are in the journals of `workers`."""
        temporary = self.path / f".{secrets.token_hex(8)}"
        temporary.write_text(json.dumps(sorted(workers)), encoding="utf-8")
        os.replace(temporary, self.path / task.done)

    def authors(self, task: ChunkTask) -> list[str]:
        """The workers whose journals hold the lines of a task that is done."""
        if not self._authors.get(task):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads((self.path / task.done).read_bytes())
                self._authors[task] = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
        return self._authors.get(task, [])

    def forget_lost(self) -> None:
        """Takes back that tasks are done whose journals were removed, and with a chunk that it was checked."""
        journals = {path.name.removesuffix(".journal") for path in self.path.glob("*.journal")}
        done = self.look().done
        lost = {task for task in done if not self.authors(task) or not journals.issuperset(self.authors(task))}
        for task in done:
            if task in lost or ChunkTask(task.chunk) in lost:
                (self.path / task.done).unlink(missing_ok=True)

    def look(self) -> View:
        """Returns what is in the folder now. Raises `InputError` if it is gone."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError as error:
            raise InputError(f"{self.path} was removed while workers used it: start them again") from error
        done: set[ChunkTask] = set()
        claimed: dict[ChunkTask, list[str]] = {}
        for name in names:
            if match := NAME.fullmatch(name):
                task = ChunkTask(int(match[1]), match[2].startswith("check"))
                if name == task.done:
                    done.add(task)
                else:
                    claimed.setdefault(task, []).append(name)
        live = frozenset(name.removesuffix(".alive") for name in names if name.endswith(".alive") and self._is_young(name))
        claims = {
            task: tuple(self._claim(name, live) for name in sorted(files, key=lambda name: (len(name), name)))
            for task, files in claimed.items()
            if task not in done
        }
        self._authors = {task: who for task, who in self._authors.items() if task in done}
        return View(done, claims, live)

    def _claim(self, name: str, live: frozenset[str]) -> Claim:
        if name not in self._claims:
            try:
                value = json.loads((self.path / name).read_bytes())
                self._claims[name] = str(value["worker"]), int(value["start"])
            except (OSError, ValueError, KeyError, TypeError):  # being written, or its writer was killed then
                return Claim("", 0, self._is_young(name))
        worker, start = self._claims[name]
        return Claim(worker, start, worker in live)

    def _is_young(self, name: str) -> bool:
        """Whether the file was written to of late, by the clock of the file system."""
        try:
            written = (self.path / name).stat().st_mtime
        except OSError:
            return False
        return self._stamped + (self.clock.now() - self._beaten) - written < self._stale_s


def chunk_folder(out: Path) -> Path:
    """`out.jsonl` -> `out.jsonl.chunks`."""
    return out.with_name(f"{out.name}.chunks")


def worker_name() -> str:
    """A name that no other worker has: host, process and a random tag."""
    host = UNNAMED.sub("_", socket.gethostname()) or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


def host_of(worker: str) -> str:
    """The host in a worker's name."""
    return worker.rsplit("-", 2)[0]
