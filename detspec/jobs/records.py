"""What an audit reads: the lines that a job wrote, its manifest, and the prompts they came from."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from detspec.config import Schedule, is_count
from detspec.engine.batch import beside, parse_request, refuse_unknown
from detspec.engine.engine import Engine
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.sampling import SamplingParams

RECORD_KEYS = ("id", "token_ids", "text", "logprobs", "finish_reason", "prompt_len", "digest")


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One line of output as it stands in the file, believed in nothing but its form."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: np.ndarray  # float64, as the decimals read
    finish_reason: str
    prompt_len: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a job says its bits depend on.

    Attributes:
        digest: of the fingerprint; part of each completion's digest.
        fingerprint: device kind, versions, model, schedule.
        sampling: what prompts did not give themselves.
        max_len: positions that a request could take.
        source, sha256: of the file of prompts; None in manifests that do not name it.
    """

    digest: str
    fingerprint: dict[str, Any]
    sampling: SamplingParams
    max_len: int
    source: str | None
    sha256: str | None

    @property
    def schedule(self) -> Schedule:
        """Of the job's canonical pass."""
        return Schedule(**self.fingerprint["schedule"])


def read_manifest(records: Path) -> Manifest:
    """The manifest beside `records`.

    Raises:
        InputError: it is not there, is no manifest, or its digest is not that of its fingerprint.
    """
    path = beside(records, "manifest")
    try:
        found = json.loads(path.read_bytes())
        prompts = found.get("prompts", {})
        fingerprint = found["fingerprint"]
        manifest = Manifest(
            digest=found["digest"],
            fingerprint=fingerprint,
            sampling=SamplingParams(**found["sampling"]),
            max_len=found["engine"]["max_len"],
            source=prompts.get("source"),
            sha256=prompts.get("sha256"),
        )
        if not is_count(manifest.max_len) or not isinstance(fingerprint["model"], str):
            raise ValueError("max_len or model")
        _ = manifest.schedule
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; an audit needs the manifest that the job wrote beside its output"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no manifest of a job that this version can read: {error!r}") from error
    if hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest() != manifest.digest:
        raise InputError(f"{path}: its digest {manifest.digest} is not that of its fingerprint: the file was changed")
    return manifest


def read_records(path: Path, vocab_size: int) -> Iterator[Record]:
    """The records of a file, read one line at a time; blank lines are skipped.

    Raises:
        InputError: names the line and what is wrong with its form.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    yield parse_record(raw, vocab_size)
                except InputError as error:
                    raise InputError(f"{path} line {number}: {error}") from error


def parse_record(raw: bytes, vocab_size: int) -> Record:
    """One line of output; `InputError` says what is wrong with its form."""
    try:
        line = json.loads(raw)
    except ValueError as error:  # JSON's and UTF-8's errors are of this class
        raise InputError(f"is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise InputError(f"must be a JSON object, got {type(line).__name__}")
    refuse_unknown(line, RECORD_KEYS, "key")
    missing = [key for key in RECORD_KEYS if key not in line]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}: records are lines that `detspec generate` wrote")
    for key in ("id", "text", "finish_reason", "digest"):
        if not isinstance(line[key], str):
            raise InputError(f'"{key}" must be a string, got {line[key]!r}')
    for key in ("token_ids", "logprobs"):
        if not isinstance(line[key], list):
            raise InputError(f'"{key}" must be a list, got {line[key]!r}')
    for token in line["token_ids"]:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(f'"token_ids" must hold integers in 0 .. {vocab_size - 1}, got {token!r} (id {line["id"]!r})')
    for logprob in line["logprobs"]:
        if type(logprob) not in (int, float) or not math.isfinite(logprob):
            raise InputError(f'"logprobs" must hold finite numbers, got {logprob!r} (id {line["id"]!r})')
    logprobs = np.asarray(line["logprobs"], np.float64)
    return Record(**{**line, "token_ids": tuple(line["token_ids"]), "logprobs": logprobs})


class PromptsById:
    """The file that the records' prompts stand in; of it, ids and places alone are held. A context manager."""

    def __init__(self, path: Path, sha256: str | None) -> None:
        """Opens `path`, hashes it and notes where each id stands.

        Raises:
            InputError: it cannot be read, or its SHA-256 is not `sha256`.
        """
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; name the file of prompts with --prompts") from error
        self._path = path
        self._place: dict[str, int] = {}
        whole, place = hashlib.sha256(), 0
        for raw in self._file:
            whole.update(raw)
            id = _id_of(raw)
            if id is not None:
                self._place.setdefault(id, place)
            place += len(raw)
        if sha256 is not None and whole.hexdigest() != sha256:
            self._file.close()
            raise InputError(f"{path} has SHA-256 {whole.hexdigest()}, but the job read prompts of SHA-256 {sha256}")

    def __enter__(self) -> "PromptsById":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def request(self, id: str, engine: Engine, defaults: SamplingParams) -> Request:
        """The request of that id.

        Raises:
            InputError: there is no such line, or it is no sound request.
        """
        if id not in self._place:
            raise InputError(f"{self._path} has no line with the id {id!r}, which is among the records")
        self._file.seek(self._place[id])
        try:
            return parse_request(self._file.readline(), engine, defaults)
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from error


def _id_of(raw: bytes) -> str | None:
    """The id of a line; None if it has none: it matters only if a record comes from it."""
    try:
        line = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    id = line.get("id") if isinstance(line, dict) else None
    return id if isinstance(id, str) else None
