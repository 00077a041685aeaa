"""The journal of a job: completions in the order they finish, appended to a file next to the output.

The first line holds the job's header, each further line one completion. Each line ends in a checksum of its content:

    {"number": 7, "index": 0, "num_tokens": 3, "finish_reason": "stop", "line": {"id": "h", ...}, "crc32": "0f3a99c1"}

`number` is the request's place among the lines of input, `index` tells its completions apart, `line` is the line of output.
An incomplete last line (the process was killed, power failed, the disk was full) is cut off. Any other damage is an error.
Memory holds one offset per completion.
"""

import contextlib
import fcntl
import json
import os
import re
import sys
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.jobs.files import sync_folder
from detspec.jobs.lines import Output
from detspec.jobs.manifest import differences
from detspec.read_json import parse_json

SECONDS_BETWEEN_SYNCS = 1.0
HEADER = b'{"header": '
ENTRY = re.compile(
    rb'\{"number": (\d{1,18}), "index": (\d{1,18}), "num_tokens": (\d{1,18}), "finish_reason": "(\w+)", "line": '
)
CHECKSUM = b', "crc32": "%08x"}\n'
CHECKSUM_BYTES = len(CHECKSUM % 0)
NOWHERE = -1


class Journal:
    """The completions of one shard so far; made by `open_journal` or `read_journal`.

    Attributes:
        path: the file.
        num_kept: completions in the file.
        num_tokens: tokens of these completions.
        num_failed: kept completions with finish reason "error".
    """

    def __init__(self, path: Path, end: int, file: FileIO | None) -> None:
        """A journal whose header ends at byte `end`; it writes to `file`, or is read-only if that is None."""
        self.path = path
        self.num_kept = self.num_tokens = self.num_failed = 0
        self._file = file
        self._end = end
        self._pending: list[bytes] = []
        self._first = 0
        self._starts = array("Q", [0])  # output index of each request's first completion, then the end
        self._offsets = array("q")  # byte in the file where each output line's entry begins
        self._synced = time.monotonic()
        self._unsynced = False

    def load(self, first: int, counts: Sequence[int]) -> None:
        """Reads the entries of requests `first`, `first + 1` and so on, which have `counts` completions each.

        Raises `InputError` if an entry is damaged and valid ones follow, or an entry belongs to another job.
        """
        self._first = first
        for count in counts:
            self._starts.append(self._starts[-1] + count)
        self._offsets.extend(NOWHERE for _ in range(self._starts[-1]))
        for raw in sound_lines(self.path, self._end):
            self._note(raw)
        if self._file is not None:
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def has(self, number: int) -> bool:
        """Whether all completions of request `number` are in the file."""
        start, end = self._places(number)
        return NOWHERE not in self._offsets[start:end]

    @property
    def end(self) -> int:
        """Byte at which the next entry will begin."""
        return self._end

    @property
    def num_todo(self) -> int:
        """Completions to generate: all completions of each request that is not wholly in the file."""
        numbers = range(self._first, self._first + len(self._starts) - 1)
        return sum(end - start for number in numbers if not self.has(number) for start, end in [self._places(number)])

    def add(self, number: int, output: Output, *, again: bool = False) -> None:
        """Adds one line of output; the next `flush` writes it to the file.

        One that is in the journal already is left out, unless it was generated `again` to be compared.
        """
        if again or self._offsets[self._places(number)[0] + output.index] == NOWHERE:
            entry = b'{"number": %d, "index": %d, "num_tokens": %d, "finish_reason": "%s", "line": %s'
            facts = (number, output.index, output.num_tokens, output.finish_reason.encode(), output.line)
            self._pending.append(_checked(entry % facts))

    def flush(self) -> None:
        """Writes pending entries to the file; syncs the file to disk at most once a second.

        Raises `OSError` if the disk is full; entries written before are kept.
        """
        pending = self._pending
        self._pending = []  # nothing may be written after an incomplete entry
        for raw in pending:
            _write(_writable(self._file), raw)
            self._note(raw)
            self._unsynced = True
        if self._unsynced and time.monotonic() - self._synced >= SECONDS_BETWEEN_SYNCS:
            self.sync()

    def sync(self) -> None:
        """Writes pending entries and syncs the file to disk."""
        if self._pending:
            self.flush()
        os.fsync(_writable(self._file))
        self._synced = time.monotonic()
        self._unsynced = False

    def outputs(self) -> Iterator[Output]:
        """Yields all lines of output, in the order of the input. The journal must be complete.

        Raises `InputError` if an entry was damaged after it was written.
        """
        with self.path.open("rb") as file:
            for offset in self._offsets:
                file.seek(offset)
                found = line_of(file.readline())
                if found is None:
                    raise InputError(f"{self.path} was damaged at byte {offset}: start over with --fresh")
                yield found[1]

    def remove(self) -> None:
        """Deletes the file."""
        self.path.unlink()
        sync_folder(self.path.parent)

    def _places(self, number: int) -> tuple[int, int]:
        """Output indices of the request's first completion and of the next request's."""
        return self._starts[number - self._first], self._starts[number - self._first + 1]

    def _note(self, raw: bytes) -> None:
        """Records a valid entry that begins at the current end."""
        entry = ENTRY.match(raw)
        if entry is None or not 0 <= int(entry[1]) - self._first < len(self._starts) - 1:
            raise InputError(f"{self.path} holds an entry of another job at byte {self._end}: start over with --fresh")
        start, end = self._places(int(entry[1]))
        place = start + int(entry[2])
        if place < end and self._offsets[place] == NOWHERE:
            self._offsets[place] = self._end
            self.num_failed += entry[4] == b"error"
            self.num_kept += 1
            self.num_tokens += int(entry[3])
        self._end += len(raw)


def sound_lines(path: Path, start: int, *, is_written: bool = False) -> Iterator[bytes]:
    """The entries from byte `start` on; an incomplete one at the end is left out.

    `is_written`: another process may be writing it, so the first entry that is not whole is the end for now. Else raises
    `InputError` if an entry is damaged and valid ones follow.
    """
    end = start
    torn = 0
    with path.open("rb") as file:
        file.seek(start)
        for raw in file:
            if not _is_sound(raw):
                if is_written or not raw.endswith(b"\n"):
                    return
                torn += len(raw)
            elif torn:
                raise InputError(
                    f"{path} is damaged at byte {end}, and valid again after that: start over with --fresh (remove a worker's "
                    f"journal, and start a worker again), or keep the part before the damage: `truncate --size {end} {path}`"
                )
            else:
                yield raw
                end += len(raw)


def line_of(raw: bytes) -> tuple[int, Output] | None:
    """The number of the line of input and the line of output in an entry; None if it is none."""
    entry = ENTRY.match(raw)
    if entry is None or not _is_sound(raw):
        return None
    return int(entry[1]), Output(int(entry[2]), int(entry[3]), entry[4].decode(), raw[entry.end() : -CHECKSUM_BYTES])


@contextlib.contextmanager
def open_journal(path: Path, header: Mapping[str, Any], *, fresh: bool = False) -> Iterator[Journal]:
    """The journal of the job with `header`, created if missing, and locked against other processes.

    If an exception ends the block, what was added is synced to disk first, as far as there is room.

    Raises `InputError` if another process uses it, or it belongs to another job. With `fresh` it is emptied instead of the
    latter.
    """
    with _locked(path) as file:
        end = 0 if fresh else _header_end(path, header)
        if not end:
            file.truncate(0)
            _write(file, _checked(HEADER + json.dumps(header).encode()))
            os.fsync(file)
            sync_folder(path.parent)
            end = file.tell()
        journal = Journal(path, end, file)
        try:
            yield journal
        except BaseException:
            journal.sync()
            if os.fstat(file.fileno()).st_size == end:  # nothing to resume from
                journal.remove()
            raise


def read_journal(path: Path, header: Mapping[str, Any]) -> Journal | None:
    """The journal for reading only; None if there is none; `InputError` if it belongs to another job."""
    end = _header_end(path, header) if path.exists() else 0
    return Journal(path, end, None) if end else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    """The file at `path`, created if missing, and locked if the file system supports locks."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"{path} is in use: another process runs this job") from error
            except OSError as error:
                message = f"{path} cannot be locked ({error.strerror}): let no other process run this job"
                print(f"detspec: warning: {message}", file=sys.stderr)
            # Otherwise a job that ended has just removed it.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return


def _header_end(path: Path, header: Mapping[str, Any]) -> int:
    """Byte at which the header ends; 0 if it is missing or incomplete, or is another job's without completions."""
    with path.open("rb") as file:
        raw = file.readline()
        if not _is_sound(raw):
            if not HEADER.startswith(raw.rstrip(b"\0")[: len(HEADER)]):
                raise InputError(f"{path} is no journal of a job: name another --out, or write over it with --fresh")
            if file.read(1):
                raise InputError(f"{path} is damaged in its first line: start over with --fresh")
            return 0
        nothing_kept = not file.read(1)
    body = parse_json(raw)
    found = body.get("header") if isinstance(body, dict) else None
    if found != header and nothing_kept:
        return 0
    if found != header:
        parts = "; ".join(differences(found, header, them="journal"))
        raise InputError(
            f"{path} belongs to another job: {parts}. Repeat the first command unchanged, name another --out, or use --fresh"
        )
    return len(raw)


def _checked(body: bytes) -> bytes:
    """A whole line from `body`, which lacks the closing brace."""
    return body + CHECKSUM % zlib.crc32(body)


def _is_sound(raw: bytes) -> bool:
    """Whether the line ends in the right checksum."""
    return raw[-CHECKSUM_BYTES:] == CHECKSUM % zlib.crc32(raw[:-CHECKSUM_BYTES])


def _writable(file: FileIO | None) -> FileIO:
    assert file is not None, "a journal of read_journal is read-only"
    return file


def _write(file: FileIO, raw: bytes) -> None:
    """Writes all of `raw`."""
    while raw:
        raw = raw[file.write(raw) :]
