"""The input of a job: its file of prompts, opened and hashed once and read line by line, and how its lines are taken."""

import dataclasses
import datetime
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from detspec.checkpoint.template_time import template_time
from detspec.errors import InputError
from detspec.jobs.files import STDIO
from detspec.sampling_params import SamplingParams

MAX_LINE_BYTES = 16 << 20  # about four million tokens of text
UNSHARDED = (0, 1)


class Mark(NamedTuple):
    """Where a file of prompts can be read from.

    Attributes:
        number: index of the next line that is not blank.
        place: number of the next line in the file, from 1.
        byte: where that begins.
    """

    number: int
    place: int
    byte: int


START = Mark(0, 1, 0)


class PromptLines(Protocol):
    """What a job reads: lines with their places, as often as it wants. The attributes are those of `Prompts`."""

    source: str
    name: str
    sha256: str

    @property
    def options(self) -> dict[str, str | None]:
        """How `source` is read, if that needs saying."""

    def marked(self, start: Mark = ...) -> Iterator[tuple[Mark, bytes]]:
        """Lines that are not blank, each with its place."""

    def lines(self, start: Mark = ...) -> Iterator[tuple[int, int, bytes]]:
        """The same, with index and line number."""

    def marks(self, size: int) -> Iterator[Mark]:
        """Where each block of `size` lines begins."""


class Prompts:
    """A file of JSON lines, open for reading; a context manager.

    Attributes:
        source: the name as given.
        name: the name used in messages.
        sha256: SHA-256 of the whole file, in hex.
    """

    def __init__(self, source: str) -> None:
        """Opens and hashes `source`. Input that cannot be read twice ("-", pipes) is copied to a temporary file.

        Raises `InputError` if the file is missing or cannot be read.
        """
        self.source = source
        self.name = "stdin" if source == STDIO else source
        self._file = _spool(sys.stdin.buffer) if source == STDIO else _open(source)
        self._stamp = self._changed()
        self.sha256 = hash_file(self._file)

    def __enter__(self) -> "Prompts":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def options(self) -> dict[str, str | None]:
        """Nothing has to be said of lines."""
        return {}

    def lines(self, start: Mark = START) -> Iterator[tuple[int, int, bytes]]:
        """Yields index, line number in the file from 1, and bytes of each non-blank line. Use one iterator at a time.

        Raises `InputError` if the file changed since it was opened.
        """
        for mark, raw in self.marked(start):
            yield mark.number, mark.place, raw

    def marks(self, size: int) -> Iterator[Mark]:
        """Yields where each block of `size` non-blank lines begins."""
        return (mark for mark, _ in self.marked() if mark.number % size == 0)

    def marked(self, start: Mark = START) -> Iterator[tuple[Mark, bytes]]:
        """Yields the non-blank lines with their places, see `lines`."""
        self._file.seek(start.byte)
        number = start.number
        for place, (byte, raw) in enumerate(bounded_lines(self._file), start=start.place):
            if self._changed() != self._stamp:
                raise InputError(f"{self.name} was changed while the job read it: start the job again, and do not change it")
            if raw.strip():
                yield Mark(number, place, byte), raw.removesuffix(b"\n")
                number += 1

    def _changed(self) -> tuple[int, int]:
        """Size and modification time of the file."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """What a job reads, and how."""

    prompts: PromptLines  # the file of prompts
    defaults: SamplingParams  # sampling parameters for fields that a line does not give
    shard: tuple[int, int] = UNSHARDED  # index and number of shards; a shard is a contiguous block of the lines
    on_error: str = "stop"  # "stop" raises at a malformed line; "reject" skips it and writes it to `*.rejects.jsonl`
    is_openai: bool = False  # lines are OpenAI's batch lines; a malformed one is answered in `*.errors.jsonl`
    created: int | None = None  # seconds since 1970 that answers to OpenAI's lines, and chat templates, say it is

    @property
    def now(self) -> datetime.datetime:
        """The time that chat templates print."""
        return template_time(self.created)


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Byte at which each line begins, and the line.

    A line of more than `MAX_LINE_BYTES` is cut after one byte more, and `parse_line` rejects it.
    """
    while raw := file.readline(MAX_LINE_BYTES + 1):
        yield file.tell() - len(raw), raw
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):  # passes over the rest
            raw = file.readline(MAX_LINE_BYTES + 1)


def hash_file(file: BufferedReader | BufferedRandom) -> str:
    """SHA-256 of the rest of `file`, in hex."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _open(source: str) -> BufferedReader | BufferedRandom:
    """The file itself, or a copy of its content if it is a pipe."""
    try:
        file = Path(source).open("rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--prompts {source}: {error.strerror}") from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        return _spool(file)


def _spool(stream: BinaryIO) -> BufferedRandom:
    """A temporary copy of `stream`, positioned at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(stream, file)
    file.seek(0)
    return file
