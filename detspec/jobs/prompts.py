"""The file of prompts: opened and hashed once, read as often as needed, never held."""

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from detspec.errors import InputError
from detspec.jobs.files import STDIO

CHUNK = 1 << 20


class Prompts:
    """A file of JSON lines, open for reading; a context manager.

    Attributes:
        source: the name that was given.
        name: the name in messages.
        sha256: of the whole file, in hex.
    """

    def __init__(self, source: str) -> None:
        """Opens and hashes `source`; what cannot be read twice ("-", pipes) is copied into a temporary file.

        Raises:
            InputError: there is no such file, or it cannot be read.
        """
        self.source = source
        self.name = "stdin" if source == STDIO else source
        self._file = _spool(sys.stdin.buffer) if source == STDIO else _open(source)
        self._stamp = self._changed()
        self.sha256 = hash_file(self._file)

    def __enter__(self) -> "Prompts":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, place in the file counted from 1, and bytes of each line that is not blank; one reading at a time.

        Raises:
            InputError: the file was changed since it was opened.
        """
        self._file.seek(0)
        number = 0
        for place, raw in enumerate(self._file, start=1):
            if self._changed() != self._stamp:
                raise InputError(f"{self.name} was changed while the job read it: let it be, and start the job again")
            if raw.strip():
                yield number, place, raw.removesuffix(b"\n")
                number += 1

    def _changed(self) -> tuple[int, int]:
        """Size and time of the last change."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def hash_file(file: BinaryIO) -> str:
    """SHA-256 of the rest of `file`, in hex."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _open(source: str) -> BinaryIO:
    """The file, or a copy of what comes out of it if it is a pipe."""
    try:
        file = Path(source).open("rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--prompts {source}: {error.strerror}") from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        return _spool(file)


def _spool(stream: BinaryIO) -> BinaryIO:
    """A temporary copy of `stream`, at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    while chunk := stream.read(CHUNK):
        file.write(chunk)
    file.seek(0)
    return file
