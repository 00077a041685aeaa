"""The log of what a server answered, which `detspec audit --responses` replays.

A line that has a fingerprint says what all bits after it depend on. Each further line is one sample that has ended, or one text
that was scored: what was asked, and the record that a batch job would have written. What cannot be logged is not answered.
"""

import contextlib
import dataclasses
import fcntl
import json
import mmap
import os
import stat
from pathlib import Path

from detspec.engine.engine import Engine
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.jobs.audit import GIVEN_KEY, HEADER_KEYS
from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE
from detspec.jobs.lines import completion_line
from detspec.read_json import parse_json
from detspec.serve.calls import EngineStopped


class ResponseLog:
    """A file that lines are appended to; each is whole on disk before the next begins, unless the machine fails."""

    def __init__(self, path: Path, engine: Engine) -> None:
        """Opens `path`, cuts off a last line that is not whole, and says what bits depend on.

        Raises `InputError` if it cannot be written, is no log, or another process writes to it.
        """
        self._path = path
        self._failed: EngineStopped | None = None
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(path.open("ab+", buffering=0))
                self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
                if self._is_regular:
                    self._lock()
                    self._end = self._whole_lines()
                    self._file.truncate(self._end)
                self.begin(engine)
            except (OSError, EngineStopped) as error:
                why = error.strerror if isinstance(error, OSError) else error.__cause__.strerror  # type: ignore[union-attr]
                raise InputError(f"--log {path}: {why}") from error
            stack.pop_all()  # it stays open

    def begin(self, engine: Engine) -> None:
        """Says what all bits from here on depend on. Raises `EngineStopped`, as `write`."""
        config = {**dataclasses.asdict(engine.config), "schedule": engine.schedule.bits()}
        facts = {"fingerprint": engine.fingerprint(), "text": engine.model.text_facts(), "engine": config}
        self._write(json.dumps(facts).encode())

    def write(self, request: Request, completion: Completion) -> None:
        """Appends what came of one sample of `request`.

        Raises `EngineStopped` if it cannot be written: nothing further is answered. No part of the line is left.
        """
        given = {GIVEN_KEY: request.given_token_ids} if request.given_token_ids else {}
        asked = {"prompt_token_ids": request.prompt_token_ids, **given, "sampling": request.sampling.facts()}
        record = completion_line(completion, request.sampling.n)
        self._write(json.dumps(asked).encode()[:-1] + b', "record": ' + record + b"}")

    def close(self) -> None:
        """No lines follow."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._failed is not None:
            raise self._failed
        rest = line + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            why = f"cannot write --log {self._path}: {error.strerror}; no further answer was given"
            self._failed = EngineStopped(why, NO_ROOM_CODE if error.errno in NO_ROOM else 1)
            if self._is_regular:
                self._file.truncate(self._end)
            raise self._failed from error
        if self._is_regular:
            self._end += len(line) + 1

    def _lock(self) -> None:
        """Keeps other servers away, if the file system supports locks: their lines would be cut off."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"--log {self._path} is in use: another server writes to it") from error
        except OSError:  # a file system without locks
            return

    def _whole_lines(self) -> int:
        """Bytes of the lines that are whole; `InputError` unless they are those of a log."""
        size = os.fstat(self._file.fileno()).st_size
        if not size:
            return 0
        with mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ) as content:
            end = content.rfind(b"\n") + 1
            first = content[: content.find(b"\n") + 1]
        try:
            header = parse_json(first)
        except InputError:
            header = None
        if not isinstance(header, dict) or header.keys() != HEADER_KEYS:
            raise InputError(f"--log {self._path} holds something else than a server's log: name another file")
        return end
