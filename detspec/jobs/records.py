"""The input of an audit: the lines that a job wrote, and its prompts."""

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from detspec.checkpoint.conversation import NO_TIME
from detspec.checkpoint.load import Model
from detspec.config import is_number
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.jobs.batch_lines import KEY, parse_id
from detspec.jobs.files import NO_ROOM
from detspec.jobs.lines import LOGPROB_KEYS, parse_line, parse_request, refuse_unknown
from detspec.jobs.prompts import Mark
from detspec.jobs.tables import open_prompts
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams

NOWHERE = -1
RECORD_KEYS = ("id", "token_ids", "text", "logprobs", "finish_reason", "prompt_len", "digest")


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One line of output as written in the file; only its form is checked."""

    id: str
    index: int | None  # number of the sample; None if the line has no index, as for requests of one sample
    token_ids: tuple[int, ...]
    text: str
    logprobs: np.ndarray  # float64, as parsed from the decimals; nan for null
    finish_reason: str
    prompt_len: int
    digest: str
    logprobs_mode: str  # "raw" if the line has no mode
    thoughts: list[dict[str, Any]]  # as in the line; [] if it has none
    asked: dict[str, Any]  # entries of the line under `LOGPROB_KEYS`
    metadata: dict[str, Any] | None = None  # what the line carries from its line of input
    error: str = ""  # what was raised for the request

    @property
    def name(self) -> str:
        """The name of the record in reports: `a`, or `a[2]` for one of several samples."""
        return self.id if self.index is None else f"{self.id}[{self.index}]"

    @property
    def has_failed(self) -> bool:
        """Whether something was raised for the request, so that there is nothing of it: no tokens, text and digest."""
        return bool(self.error) and self.finish_reason == "error" and not (self.token_ids or self.text or self.digest)


def read_records(path: Path, vocab_size: int) -> Iterator[Record]:
    """Yields the records of a file, one line at a time; blank lines are skipped.

    Raises `InputError` if a line is malformed; the message names it and says what is wrong.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    yield parse_record(raw, vocab_size)
                except InputError as error:
                    raise InputError(f"{path} line {number}: {error}") from error


def parse_record(raw: bytes, vocab_size: int) -> Record:
    """Parses one line of output; `InputError` says what is wrong with its form."""
    line = parse_json(raw)
    if not isinstance(line, dict):
        raise InputError(f"must be a JSON object, got {type(line).__name__}")
    refuse_unknown(line, (*RECORD_KEYS, "index", "logprobs_mode", "thoughts", "error", *LOGPROB_KEYS, "metadata"), "key")
    if missing := [key for key in RECORD_KEYS if key not in line]:
        raise InputError(f"lacks {', '.join(missing)}: records are lines that `detspec generate` wrote")
    for key in ("id", "text", "finish_reason", "digest", "error"):
        if not isinstance(line.get(key, ""), str):
            raise InputError(f'"{key}" must be a string, got {line[key]!r}')
    if "index" in line and type(line["index"]) is not int:
        raise InputError(f'"index" must be an integer, got {line["index"]!r}')
    for key in ("token_ids", "logprobs", "thoughts", *LOGPROB_KEYS):
        if not isinstance(line.get(key, []), list):
            raise InputError(f'"{key}" must be a list, got {line[key]!r}')
    if not isinstance(line.get("metadata", {}), dict):
        raise InputError(f'"metadata" must be an object, got {line["metadata"]!r}')
    for token in line["token_ids"]:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(f'"token_ids" must hold integers in 0 .. {vocab_size - 1}, got {token!r} (id {line["id"]!r})')
    for logprob in line["logprobs"]:
        if logprob is not None and not is_number(logprob):
            raise InputError(f'"logprobs" must hold finite numbers, got {logprob!r} (id {line["id"]!r})')
    logprobs = np.asarray([np.nan if logprob is None else logprob for logprob in line["logprobs"]], np.float64)
    asked = {key: line.pop(key) for key in LOGPROB_KEYS if key in line}
    read = {"token_ids": tuple(line["token_ids"]), "logprobs": logprobs, "asked": asked}
    return Record(**{"index": None, "logprobs_mode": "raw", "thoughts": [], **line, **read})


class PromptsById:
    """The file of prompts by id; memory holds only ids and places. A context manager.

    Attributes:
        file: all its lines.
    """

    def __init__(
        self,
        path: Path,
        sha256: str,
        *,
        column: str | None = None,
        id_column: str | None = None,
        is_openai: bool = False,
        now: datetime.datetime = NO_TIME,
    ) -> None:
        """Opens and hashes `path`, of a table these columns, and notes the place of each id, `custom_id` of OpenAI's lines.

        `now` is the time that chat templates print.

        Raises `InputError` if the file cannot be read, or its SHA-256 is not that of the job's prompts.
        """
        try:
            self.file = open_prompts(str(path), column=column, id_column=id_column)
        except InputError as error:
            raise InputError(f"{error}; name the file of prompts with --prompts") from error
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise InputError(str(error.strerror)) from error
        self._path = path
        self._now = now
        self._place: dict[str, Mark] = {}
        self._last: tuple[Request, dict[str, Any] | None] | None = None
        self._following: Iterator[tuple[Mark, bytes]] = iter(())  # lines after the last that was read
        self._number = NOWHERE  # of the next one
        if self.file.sha256 != sha256:
            self.__exit__()
            raise InputError(f"{path} has SHA-256 {self.file.sha256}, but the job read prompts of SHA-256 {sha256}")
        for mark, raw in self.file.marked():
            with contextlib.suppress(InputError):  # a malformed line matters only if a record needs it
                self._place.setdefault(parse_id(raw)[KEY] if is_openai else parse_line(raw)["id"], mark)

    def __enter__(self) -> "PromptsById":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.__exit__()

    def asked(
        self, id: str, model: Model, config: EngineConfig, defaults: SamplingParams
    ) -> tuple[Request, dict[str, Any] | None]:
        """The request with this id, and its metadata. Samples of one request follow each other, so the last one is cached.

        Raises `InputError` if no line has this id, or the line is not a valid request.
        """
        if self._last is not None and self._last[0].id == id:
            return self._last
        _, raw = self.line(id)
        try:
            line = parse_line(raw)
            self._last = parse_request(line, model, config, defaults, self._now), line.get("metadata")
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from error
        return self._last

    def line(self, id: str) -> tuple[int, bytes]:
        """The first line with this id, and its number; `InputError` if there is none."""
        if id not in self._place:
            raise InputError(f"{self._path} has no line with the id {id!r}, which is among the records")
        mark = self._place[id]
        if mark.number != self._number:
            self._following = self.file.marked(mark)
        _, raw = next(self._following)
        self._number = mark.number + 1
        return mark.number, raw
