"""Audit of a server's log: what it answered is replayed through the canonical pass, like the output of a job.

A line of the log that has a fingerprint says what the bits of the lines after it depend on: the server began, or got other
weights. Each other line holds what was asked and the record of one sample, or of one text that was scored.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from detspec.checkpoint.load import Model
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request, check_request
from detspec.errors import InputError
from detspec.jobs.audit import Recorded, audit_records, sample_of
from detspec.jobs.audit_report import AuditReport
from detspec.jobs.origin import Origin, check_model
from detspec.jobs.records import parse_record
from detspec.progress import Progress
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule

HEADER_KEYS = {"fingerprint", "text", "engine"}
GIVEN_KEY = "given_token_ids"  # of a line that holds a score: what was scored after the prompt
LINE_KEYS = {"prompt_token_ids", "sampling", "record"}


@dataclasses.dataclass
class Part:
    """The lines of a log between two changes of what bits depend on. Only where they are: a log may not fit into memory."""

    origin: Origin
    byte: int  # where they begin in the file
    place: int  # number of the first in the file, from 1
    num_lines: int = 0


def run_audit_responses(model: Model, log: Path, *, max_requests: int = 32) -> AuditReport:
    """Replays what a server with this `log` answered by `model`; samples of other weights are named and left out.

    Raises `InputError` if the log is missing or malformed, or holds nothing that `model` answered.
    """
    with open_log(log) as file:
        return _audit(model, log, file, max_requests)


def _audit(model: Model, log: Path, file: BinaryIO, max_requests: int) -> AuditReport:
    parts = read_log(log, file)
    ours = [part for part in parts if part.origin.fingerprint["model"] == model.digest]
    num_lines = sum(part.num_lines for part in ours)
    report = AuditReport(num_other_weights=sum(part.num_lines for part in parts) - num_lines)
    with Progress(num_lines, "records") as progress:
        for part in ours:
            check_model(part.origin, model)
            records = _records(part, model, log, file)
            found = audit_records(model, part.origin, records, max_requests=max_requests, progress=progress)
            report.add(found)
    if not report.num_records + report.num_ordinary:
        other = (
            f", but {report.num_other_weights} of other weights: name their folder with --model"
            if report.num_other_weights
            else ""
        )
        raise InputError(f"{log} holds no records of this model{other}")
    return report


@contextlib.contextmanager
def open_log(log: Path) -> Iterator[BinaryIO]:
    """The log, open for reading more than once: what cannot be, as a pipe, is copied. `InputError` if it cannot be read."""
    with contextlib.ExitStack() as stack:
        try:
            file: BinaryIO = stack.enter_context(log.open("rb"))
            if not file.seekable():
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(file, copy)
                copy.seek(0)
                file = copy
        except OSError as error:
            raise InputError(f"--responses {log}: {error.strerror}") from error
        yield file


def read_log(log: Path, file: BinaryIO) -> list[Part]:
    """The parts of a log that hold records; the last line may be cut off. `InputError` names a line that is no log's."""
    parts: list[Part] = []
    byte = 0
    for number, raw in enumerate(file, start=1):
        byte += len(raw)
        if not raw.endswith(b"\n"):
            break
        try:
            line = parse_json(raw)
            if not isinstance(line, dict):
                raise InputError("is no JSON object")
            if line.keys() == HEADER_KEYS:
                parts.append(Part(_origin(line), byte, number + 1))
            elif line.keys() - {GIVEN_KEY} == LINE_KEYS and parts:
                parts[-1].num_lines += 1
            else:
                raise InputError(
                    f"has the keys {', '.join(line)}; a log has {sorted(HEADER_KEYS)} first, then {sorted(LINE_KEYS)}"
                )
        except InputError as error:
            raise InputError(f"{log} line {number}: {error}") from error
    return [part for part in parts if part.num_lines]


def _records(part: Part, model: Model, log: Path, file: BinaryIO) -> Iterator[Recorded]:
    """The records of one part, each with the sample that it answers."""
    file.seek(part.byte)
    for number, raw in enumerate(itertools.islice(file, part.num_lines), start=part.place):
        try:
            line: Any = parse_json(raw)
            record = parse_record(json.dumps(line["record"]).encode(), model.cfg.vocab_size)
            sampling = SamplingParams(**line["sampling"])
            prompt = tuple(line["prompt_token_ids"])
            given = tuple(line.get(GIVEN_KEY, ()))
            request = Request(record.id, prompt, sampling, given_token_ids=given)
            yield Recorded(record, sample_of(check_request(model, part.origin.engine, request), record))
        except (InputError, KeyError, TypeError) as error:
            raise InputError(f"{log} line {number}: {error}") from error


def _origin(header: dict[str, Any]) -> Origin:
    """What a header says that bits depend on."""
    try:
        fingerprint = header["fingerprint"]
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
        engine = EngineConfig(**{**header["engine"], "schedule": Schedule.from_bits(fingerprint["schedule"])})
        return Origin(digest, fingerprint, dict(header["text"]), SamplingParams(), engine, source="", sha256="")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"is no header that this version can read: {error!r}") from error
