"""Leaves what a run has found in a folder that outlives the machine: at most four files, each of them always whole."""

import contextlib
import errno
import io
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

from prove_stages import cache_file, tables
from prove_stages.journal import Journal

RESULTS = "results.jsonl"
TABLE = "table.md"
LOGS = "logs.tgz"
PROGRAMS = "programs.tar"
FILES = (RESULTS, TABLE, LOGS, PROGRAMS)
MAX_MIB = cache_file.MAX_BYTES >> 20
LOG_BYTES = 1 << 20  # of the end of each log


class Delivery:
    """Copies results to a folder while a run goes on; without a folder it writes the table to `out` alone."""

    def __init__(self, out: Path, folder: Path | None) -> None:
        self._out = out
        self._folder = folder
        self._packing: threading.Thread | None = None
        self._left_out = 0  # programs, when they were packed last
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                _part(folder / name).unlink(missing_ok=True)  # of a run that was killed while it wrote

    def results(self) -> None:
        """Writes the results and their table; a folder that cannot be written to does not end the run."""
        with _said(self._folder):
            self._results()

    def _results(self) -> None:
        """Writes both."""
        journal = Journal(self._out / RESULTS)
        table = f"{tables.page(journal.lines())}\n".encode()
        self._put(self._out / TABLE, table)
        if self._folder is not None:
            if journal.path.exists():
                self._put(self._folder / RESULTS, journal.path.read_bytes())
            self._put(self._folder / TABLE, table)

    def all(self, *, wait: bool = False) -> None:
        """Writes results and logs, and compiled programs in a thread; `wait` until they are there."""
        self.results()
        if self._folder is None:
            return
        with _said(self._folder):
            self._put(self._folder / LOGS, self._logs())
        if self._packing is not None and (wait or not self._packing.is_alive()):
            self._packing.join()
            self._packing = None
        if self._packing is None:
            self._packing = threading.Thread(target=self._pack, daemon=True)
            self._packing.start()
        if wait:
            self._packing.join()
            if self._left_out:
                print(f"{self._folder / PROGRAMS}: {self._left_out} programs left out, beyond {MAX_MIB} MiB", flush=True)

    def _pack(self) -> None:
        """Writes the compiled programs, the smallest first, as many as fit."""
        assert self._folder is not None
        scratch = self._out / PROGRAMS
        with _said(self._folder):
            self._left_out = len(cache_file.pack(self._out / "programs", scratch))
            _move(scratch, self._folder / PROGRAMS)

    def _logs(self) -> bytes:
        """The ends of all logs as a compressed tar."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for path in sorted(self._out.glob("*.log")):
                content = path.read_bytes()[-LOG_BYTES:]
                member = tarfile.TarInfo(path.name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    def _put(self, path: Path, content: bytes) -> None:
        """Replaces `path` at once, whatever ends this process meanwhile."""
        scratch = _part(self._out / path.name)
        scratch.write_bytes(content)
        _move(scratch, path)


@contextlib.contextmanager
def _said(folder: Path | None) -> Iterator[None]:
    """Says why `folder` could not be written to."""
    try:
        yield
    except OSError as error:
        print(f"{folder}: not delivered: {error}", flush=True)


def _move(source: Path, target: Path) -> None:
    """Replaces `target` by `source` at once, also on another file system."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, _part(target))
        os.replace(_part(target), target)
        source.unlink()


def _part(path: Path) -> Path:
    """Names the file that is written before it takes its place."""
    return path.with_name(f"{path.name}.part")
