"""The input of an audit: what a manifest says that bits depend on, the lines that a job wrote, and its prompts."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detspec.checkpoint.conversation import template_time
from detspec.checkpoint.load import Model
from detspec.config import is_number
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.held import compiler_options
from detspec.integer.spec import VERSIONS
from detspec.jobs.batch_lines import KEY, parse_id
from detspec.jobs.files import NO_ROOM, sibling
from detspec.jobs.lines import LOGPROB_KEYS, parse_line, parse_request, refuse_unknown
from detspec.jobs.manifest import differences, read_manifest
from detspec.jobs.prompts import Mark
from detspec.jobs.tables import open_prompts
from detspec.model.loading import AS_IT_IS, Loading
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule

RECORD_KEYS = ("id", "token_ids", "text", "logprobs", "finish_reason", "prompt_len", "digest")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The part of a manifest, or of the header of a server's log, that an audit needs."""

    digest: str  # digest of the fingerprint; part of each completion's digest
    fingerprint: dict[str, Any]  # device kind, versions, model, schedule
    text: dict[str, Any]  # digests of tokenizer and chat template, and the model's end-of-sequence tokens
    sampling: SamplingParams  # default sampling parameters of the job
    engine: EngineConfig  # settings of the engine; its capacities decide which requests are valid
    source: str  # name of the file of prompts
    sha256: str  # SHA-256 of the file of prompts
    column: str | None = None  # column of a table that prompts came from
    id_column: str | None = None  # and of their ids
    is_openai: bool = False  # the records are OpenAI's batch lines
    created: int | None = None  # seconds since 1970 that the job said it is
    model: str | None = None  # where the job loaded its model from; None if the manifest does not say
    loading: Loading = AS_IT_IS  # and how


def read_origin(records: Path) -> Origin:
    """The origin of `records`, read from the manifest next to them.

    Raises `InputError` if a file is missing, the manifest is malformed, or its digest is not that of its fingerprint.
    """
    if not records.is_file():
        raise InputError(f"{records}: there is no such file; give the output of `detspec generate`")
    path = sibling(records, "manifest")
    manifest = read_manifest(records)
    if manifest is None:
        raise InputError(f"{path} is no manifest of a job: an audit needs the one that the job wrote next to its output")
    try:
        fingerprint = manifest["fingerprint"]
        texts = [fingerprint.get("arithmetic") or fingerprint["detspec"], fingerprint["model"], manifest["digest"]]
        texts += [manifest["prompts"]["source"], manifest["prompts"]["sha256"]]
        model = manifest.get("model", {})  # older jobs did not say it
        texts += [model[key] for key in ("source", "weights") if model.get(key) is not None]
        if not isinstance(fingerprint, dict) or not all(isinstance(text, str) for text in texts):
            raise TypeError(
                "fingerprint must be an object; its detspec and model, digest, sources, weights and sha256 must be texts"
            )
        origin = Origin(
            digest=manifest["digest"],
            fingerprint=fingerprint,
            text=dict(manifest["text"]),
            sampling=SamplingParams(**manifest["sampling"]),
            engine=EngineConfig(**{**manifest["engine"], "schedule": schedule_of(fingerprint)}),
            source=manifest["prompts"]["source"],
            sha256=manifest["prompts"]["sha256"],
            column=manifest["prompts"].get("column"),
            id_column=manifest["prompts"].get("id_column"),
            is_openai="openai" in manifest,
            model=model.get("source"),
            loading=Loading(model.get("weights"), bool(model.get("long_texts"))),
            created=_created(manifest["openai"]["created"] if "openai" in manifest else manifest.get("created")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no manifest that this version can read: {error!r}") from error
    if hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest() != origin.digest:
        raise InputError(f"{path}: its digest {origin.digest} is not that of its fingerprint: the file was changed")
    return origin


def schedule_of(fingerprint: dict[str, Any]) -> Schedule | None:
    """The schedule whose bits a fingerprint promises; None if arithmetic promises them.

    Raises `InputError` if this version has no such arithmetic.
    """
    if "arithmetic" not in fingerprint:
        return Schedule.from_bits(fingerprint["schedule"])
    if fingerprint["arithmetic"] not in (known := tuple(VERSIONS.values())):
        raise InputError(f"the records are of the arithmetic {fingerprint['arithmetic']!r}; this version has {known}")
    return None


def check_model(origin: Origin, model: Model) -> None:
    """Raises `InputError` unless `model` is the one that the records come from."""
    if origin.fingerprint["model"] != model.digest:
        here = f"{model.source} has" if model.source else "this one's is"
        raise InputError(
            f"the records come from the model with digest {origin.fingerprint['model']}, but {here} {model.digest}: name the "
            "folder with the job's own weights by --model"
        )
    if parts := differences(origin.text, model.text_facts(), them="the records' model", us="this one"):
        raise InputError(f"this model maps text and tokens differently from the records' model: {'; '.join(parts)}")


def machine_differences(origin: Origin, mesh: str) -> list[str]:
    """The differences between this machine's fingerprint, with its `mesh`, and the manifest's, a sentence each.

    The options of canonical programs are among them, which follow from the schedule and the machine. Flags of the compiler are
    unknown where an older version wrote the manifest, so they are no difference. Integer models have the same bits on all
    machines.
    """
    if "arithmetic" in origin.fingerprint:
        return []
    machine = fingerprint()
    schedule = origin.engine.schedule
    options = compiler_options(schedule.numerics, machine["backend"]) if schedule else {}
    return [
        f"{name} is {here!r}, the records' was {origin.fingerprint.get(name)!r}"
        for name, here in {**machine, "mesh": mesh, "options": options or None}.items()
        if origin.fingerprint.get(name) != here and (name != "flags" or name in origin.fingerprint)
    ]


def _created(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"created must be an integer, got {value!r}")
    return value


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """A line of output as written in the file; only its form is checked."""

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
    metadata: dict[str, Any] | None = None  # metadata of its line of input
    error: str = ""  # message that was raised for the request

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
    """Parses a line of output; `InputError` says what is wrong with its form."""
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


class Recorded(NamedTuple):
    """A record, the request of one sample that it answers, and the metadata of the line of input."""

    record: Record
    request: Request
    metadata: dict[str, Any] | None = None


def sample_of(request: Request, record: Record) -> Request:
    """Returns the sample of `request` that the index of `record` names; `InputError` if there is none."""
    n = request.sampling.n
    numbers = (None,) if n == 1 else range(n)
    if record.index not in numbers:
        known = "no index" if n == 1 else f"an index in 0 .. {n - 1}"
        raise InputError(f"the record {record.id!r} has index {record.index}, but its request has n = {n}: accepted is {known}")
    return next(itertools.islice(request.samples(), record.index or 0, None))


class PromptsById:
    """The file of prompts by id; memory holds only ids and places. A context manager.

    Attributes:
        file: all its lines.
        origin: the part of the job's manifest that an audit needs.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        """Opens and hashes `path`, the prompts of the job of `origin`, and notes the place of each id.

        Raises `InputError` if the file cannot be read, or its SHA-256 is not that of the job's prompts.
        """
        try:
            self.file = open_prompts(str(path), column=origin.column, id_column=origin.id_column)
        except InputError as error:
            raise InputError(f"{error}; name the file of prompts with --prompts") from error
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise InputError(str(error.strerror)) from error
        self.origin = origin
        self._path = path
        self._place: dict[str, Mark] = {}
        self._last: tuple[Request, dict[str, Any] | None] | None = None
        self._following: Iterator[tuple[Mark, bytes]] = iter(())  # lines after the last that was read
        self._number: int | None = None  # number of the next line; None before the first
        if self.file.sha256 != origin.sha256:
            self.__exit__()
            raise InputError(f"{path} has SHA-256 {self.file.sha256}, but the job read prompts of SHA-256 {origin.sha256}")
        for mark, raw in self.file.lines():
            with contextlib.suppress(InputError):  # a malformed line matters only if a record needs it
                self._place.setdefault(parse_id(raw)[KEY] if origin.is_openai else parse_line(mark.number, raw)["id"], mark)

    def __enter__(self) -> "PromptsById":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.__exit__()

    def asked(self, id: str, model: Model) -> tuple[Request, dict[str, Any] | None]:
        """The request with this id, and its metadata. Samples of one request follow each other, so the last one is cached.

        Raises `InputError` if no line has this id, or the line is not a valid request.
        """
        if self._last is not None and self._last[0].id == id:
            return self._last
        number, raw = self.line(id)
        try:
            line = parse_line(number, raw)
            now = template_time(self.origin.created)
            self._last = parse_request(line, model, self.origin.engine, self.origin.sampling, now), line.get("metadata")
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from error
        return self._last

    def line(self, id: str) -> tuple[int, bytes]:
        """The first line with this id, and its number; `InputError` if there is none."""
        if id not in self._place:
            raise InputError(f"{self._path} has no line with the id {id!r}, which is among the records")
        mark = self._place[id]
        if mark.number != self._number:
            self._following = self.file.lines(mark)
        _, raw = next(self._following)
        self._number = mark.number + 1
        return mark.number, raw
