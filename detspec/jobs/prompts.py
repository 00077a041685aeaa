"""The input of a job: its file of prompts, opened and hashed once and read line by line, and how its lines are taken.

A file that cannot be read at any place (a pipe, or one packed by gzip or zstd) is copied into a temporary file first, unpacked.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import io
import os
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from detspec.checkpoint.conversation import template_time
from detspec.errors import InputError
from detspec.extras import install_command
from detspec.jobs.file_kinds import GZIP, HEAD_BYTES, PACKED, kind_of
from detspec.jobs.files import NO_ROOM, STDIO
from detspec.sampling_params import SamplingParams

MAX_LINE_BYTES = 16 << 20  # about four million tokens of text
BLOCK_BYTES = 1 << 20  # block of a copy
UNSHARDED = (0, 1)
DATA = "data"  # the extra with pyarrow


class Mark(NamedTuple):
    """A place that a file of prompts can be read from.

    Attributes:
        number: index of the next line that is not blank.
        place: number of the next line in the file, from 1.
        byte: start of that line.
    """

    number: int
    place: int
    byte: int


START = Mark(0, 1, 0)


class PromptLines(Protocol):
    """Prompts of a job: lines with their places, as often as it wants. The attributes are those of `Prompts`."""

    source: str
    name: str
    sha256: str

    @property
    def options(self) -> dict[str, str | None]:
        """How `source` is read, if that needs saying."""

    def lines(self, start: Mark = ...) -> Iterator[tuple[Mark, bytes]]:
        """Lines that are not blank, each with its place."""

    def marks(self, size: int) -> Iterator[Mark]:
        """Marks of the beginnings of blocks of `size` lines."""

    def advice(self, raw: bytes) -> str:
        """An end for the error of a malformed line."""


class Prompts:
    """A file of JSON lines, open for reading; a context manager.

    Attributes:
        source: the name as given.
        name: the name used in messages.
        head: the first bytes, unpacked.
        sha256: SHA-256 of all lines as they are unpacked, in hex: the same for `x.jsonl`, `x.jsonl.gz` and a pipe of them.
    """

    def __init__(self, source: str) -> None:
        """Opens and hashes `source`. Input that cannot be read at any place is unpacked and copied to a temporary file.

        Raises `InputError` if the file is missing, or cannot be read or unpacked.
        """
        self.source = source
        self.name = "stdin" if source == STDIO else source
        self._file = _open_lines(source, self.name)
        self._stamp = self._changed()
        self.head = _head(self._file)
        self.sha256 = hash_file(self._file)

    def __enter__(self) -> "Prompts":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def options(self) -> dict[str, str | None]:
        """Returns {}: lines need no options."""
        return {}

    def marks(self, size: int) -> Iterator[Mark]:
        """Yields where each block of `size` non-blank lines begins."""
        return (mark for mark, _ in self.lines() if mark.number % size == 0)

    def advice(self, raw: bytes) -> str:
        """Returns "": errors of lines say it all."""
        return ""

    def lines(self, start: Mark = START) -> Iterator[tuple[Mark, bytes]]:
        """Yields the lines that are not blank, each with its place. Use one iterator at a time.

        Raises `InputError` if the file changed since it was opened.
        """
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
    """The input of a job, and how it is read."""

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

    @property
    def is_strict(self) -> bool:
        """Whether a malformed line ends the job."""
        return self.on_error == "stop" and not self.is_openai


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Byte at which each line begins, and the line.

    A line of more than `MAX_LINE_BYTES` is cut after one byte more, and `parse_line` rejects it.
    """
    while raw := file.readline(MAX_LINE_BYTES + 1):
        yield file.tell() - len(raw), raw
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):  # passes over the rest
            raw = file.readline(MAX_LINE_BYTES + 1)


def hash_file(file: BinaryIO) -> str:
    """SHA-256 of the rest of `file`, in hex."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _open_lines(source: str, name: str) -> BinaryIO:
    """The lines of `source`, which can be read at any place: the file itself, or a copy of its content."""
    file = _copy(sys.stdin.buffer, name) if source == STDIO else _open(source)
    kind = kind_of(_head(file))
    if kind in PACKED:
        with file, _unpacked(file, kind, name) as stream:
            file = _copy(stream, name, kind)
    return file


def _open(source: str) -> BinaryIO:
    """The file itself, or a copy of its content if it is a pipe."""
    try:
        file = Path(source).open("rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--prompts {source}: {error.strerror}") from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        return _copy(file, source)


def _head(file: BinaryIO) -> bytes:
    """The first bytes of `file`, which is left at its start."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return head


def _unpacked(file: BinaryIO, kind: str, name: str) -> BinaryIO:
    """A stream of what `file` holds, packed as `kind` says."""
    if kind == GZIP:
        return GzipFile(fileobj=file)  # type: ignore[return-value]
    try:
        import pyarrow as pa
    except ImportError as error:
        raise InputError(
            f"{name} is packed by zstd, which pyarrow unpacks: {install_command(DATA)}; or unpack it, `unzstd {name}`"
        ) from error
    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))


def _copy(stream: BinaryIO, name: str, kind: str = "a pipe") -> BinaryIO:
    """A temporary copy of `stream`, positioned at its start; memory holds one block of it.

    Raises `InputError` if it ends early, or is damaged. `OSError` of a full disk names the folder of the copy.
    """
    try:
        with contextlib.ExitStack() as closed_on_error:
            file = closed_on_error.enter_context(tempfile.TemporaryFile())
            while block := _read(stream, name, kind):
                file.write(block)
            file.seek(0)
            closed_on_error.pop_all()
    except OSError as error:  # also of closing the file, which writes the rest
        if error.errno not in NO_ROOM:
            raise
        raise OSError(
            error.errno,
            f"{error.strerror}: {name} is {kind}, whose content is copied into a temporary file in {tempfile.gettempdir()}: "
            "make room there, or set TMPDIR to a folder with more",
        ) from error
    return file


def _read(stream: BinaryIO, name: str, kind: str) -> bytes:
    """The next bytes of `stream`, at most `BLOCK_BYTES`; none at its end."""
    try:
        return stream.read(BLOCK_BYTES)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise InputError(f"{name} is {kind} that is damaged, or ends early ({error}): copy or write it again") from error
