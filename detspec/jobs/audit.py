"""Audit of what a job wrote or a server answered: every record is replayed through the canonical pass and compared bit for bit.

1. The manifest next to the records names their model, schedule and sampling; the file of prompts holds the requests.
2. The engine replays the recorded tokens, teacher-forced. At each position it gives the canonical token.
3. `difference_of` derives the canonical completion, and names the first place where the record differs from it.

A server's log is replayed in the same way. A line of it that has a fingerprint says what the bits of the lines after it depend
on: the server began, or got other weights. Each other line holds what was asked and the record of one sample, or of one text
that was scored.

Up to the first difference the record is the canonical text, so nothing has to be generated. An aborted record holds fewer
tokens than the canonical completion, and differs where it ends. A failed request has no tokens, and is counted apart. OpenAI's
lines need not hold tokens: `audit_lines` answers them again.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.intake import check_request
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.jobs.audit_lines import audit_lines
from detspec.jobs.difference import AuditReport, difference_of
from detspec.jobs.files import STDIO
from detspec.jobs.oracle import oracle
from detspec.jobs.records import (
    Origin,
    PromptsById,
    Recorded,
    check_model,
    machine_differences,
    parse_record,
    read_origin,
    read_records,
    sample_of,
    schedule_of,
)
from detspec.progress import Progress
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams

HEADER_KEYS = {"fingerprint", "text", "engine"}  # keys of a log's line that says what bits depend on
GIVEN_KEY = "given_token_ids"  # key of a line that holds a score: tokens that were scored after the prompt
LINE_KEYS = {"prompt_token_ids", "sampling", "record"}


@dataclasses.dataclass
class LogPart:
    """Tells where the lines of a log lie between two changes of what bits depend on: a log may not fit into memory."""

    origin: Origin
    byte: int  # start of the line in the file
    place: int  # number of the first in the file, from 1
    num_lines: int = 0


def run_audit(
    model: Model, records: Path, *, prompts: Path | None = None, max_requests: int = 32, by: str | None = None
) -> AuditReport:
    """Replays the output `records` of a job, which has its manifest in the same folder, `max_requests` of them together.

    `prompts` are the job's file of prompts; by default the one that the manifest names. `by` names one of `oracle.ORACLES`, for
    integer models; None is the engine.

    Raises `InputError` if files are missing or malformed, a record has no prompt, or `model` is not the manifest's.
    """
    origin = read_origin(records)
    check_model(origin, model)
    if prompts is None:
        if origin.source == STDIO:
            raise InputError("the job read its prompts from the standard input: name their file with --prompts")
        prompts = Path(origin.source)
    with PromptsById(prompts, origin) as asked, Progress(_count_lines(records), "records") as progress:
        if by is not None:
            if origin.is_openai:
                raise InputError("lines in OpenAI's format are answered by the engine again: leave --with out")
            report = audit_by_oracle(model, origin, _asked(model, records, asked), by, progress)
        elif origin.is_openai:
            report = audit_lines(model, records, asked, max_requests=max_requests, progress=progress)
        else:
            requests = _asked(model, records, asked)
            report = audit_records(model, origin, requests, max_requests=max_requests, progress=progress)
    if not report.num_records + report.num_ordinary + report.num_failed:
        raise InputError(f"{records} holds no records")
    return report


def audit_records(
    model: Model, origin: Origin, records: Iterable[Recorded], *, max_requests: int, progress: Progress
) -> AuditReport:
    """Replays `records` of `origin`, and compares them; see `run_audit`."""
    config = dataclasses.replace(origin.engine, max_requests=max_requests, num_pages=None, method="none", thoughts="none")
    engine = Engine(model, config)
    report = AuditReport(machine=machine_differences(origin, str(engine.fingerprint().get("mesh"))))
    waiting: deque[Recorded] = deque()
    progress.stage("compiling and certifying", at_once=True)
    engine.prepare_replays()
    progress.stage("replaying", at_once=True)
    began = time.perf_counter()
    for replay in engine.replay(_to_replay(records, waiting, report, progress)):
        recorded = waiting.popleft()
        found = difference_of(recorded, replay, model, origin.digest)
        num_tokens = len(recorded.record.token_ids)
        report.count(found, num_tokens, deterministic=recorded.request.sampling.deterministic)
        progress.finished()
        progress.segment(num_tokens, len(waiting))
    report.replay_s = time.perf_counter() - began
    return report


def audit_by_oracle(model: Model, origin: Origin, records: Iterable[Recorded], by: str, progress: Progress) -> AuditReport:
    """Compares `records` of `origin` with what the oracle `by` says of their tokens, one after the other."""
    report = AuditReport()
    progress.stage("reading", at_once=True)
    began = time.perf_counter()
    with oracle(model, by) as replay_of:
        for recorded in records:
            record, request, _ = recorded
            if record.has_failed:
                report.num_failed += 1
            else:
                tokens = request.given_token_ids or record.token_ids[: request.sampling.max_tokens]
                found = difference_of(recorded, replay_of(request, tokens), model, origin.digest)
                report.count(found, len(record.token_ids), deterministic=request.sampling.deterministic)
            progress.finished()
    report.replay_s = time.perf_counter() - began
    return report


def _to_replay(
    records: Iterable[Recorded], waiting: deque[Recorded], report: AuditReport, progress: Progress
) -> Iterator[tuple[Request, Sequence[int]]]:
    """Yields requests and tokens for `Engine.replay`; appends `records` to `waiting`, but counts failed ones in `report`."""
    for asked in records:
        if asked.record.has_failed:
            report.num_failed += 1
            progress.finished()
            continue
        waiting.append(asked)
        record, request, _ = asked
        yield request, request.given_token_ids or record.token_ids[: request.sampling.max_tokens]


def _asked(model: Model, records: Path, prompts: PromptsById) -> Iterator[Recorded]:
    """The records of a job, each with the sample that it answers."""
    seen: set[str] = set()
    for record in read_records(records, model.cfg.vocab_size):
        if record.name in seen:
            raise InputError(f"{records}: the record {record.name!r} occurs twice")
        seen.add(record.name)
        request, metadata = prompts.asked(record.id, model)
        yield Recorded(record, sample_of(request, record), metadata)


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for raw in file if raw.strip())
    except OSError as error:
        raise InputError(f"--records {path}: {error.strerror}") from error


# A server's log -----------------------------------------------------------------------------------------------------------


def run_audit_responses(model: Model, log: Path, *, max_requests: int = 32, by: str | None = None) -> AuditReport:
    """Replays what a server with this `log` answered by `model`; samples of other weights are named and left out.

    `by` is as for `run_audit`.

    Raises `InputError` if the log is missing or malformed, or holds nothing that `model` answered.
    """
    with open_log(log) as file:
        return _audit_log(model, log, file, max_requests, by)


def _audit_log(model: Model, log: Path, file: BinaryIO, max_requests: int, by: str | None) -> AuditReport:
    parts = read_log(log, file)
    ours = [part for part in parts if part.origin.fingerprint["model"] == model.digest]
    num_lines = sum(part.num_lines for part in ours)
    report = AuditReport(num_other_weights=sum(part.num_lines for part in parts) - num_lines)
    with Progress(num_lines, "records") as progress:
        for part in ours:
            check_model(part.origin, model)
            records = _records_of(part, model, log, file)
            if by is None:
                report.add(audit_records(model, part.origin, records, max_requests=max_requests, progress=progress))
            else:
                report.add(audit_by_oracle(model, part.origin, records, by, progress))
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
    """Opens the log for reading more than once: what cannot be, as a pipe, is copied. `InputError` if it cannot be read."""
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


def read_log(log: Path, file: BinaryIO) -> list[LogPart]:
    """The parts of a log that hold records; the last line may be cut off. `InputError` names a line that is no log's."""
    parts: list[LogPart] = []
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
                parts.append(LogPart(_origin_of(line), byte, number + 1))
            elif line.keys() - {GIVEN_KEY} == LINE_KEYS and parts:
                parts[-1].num_lines += 1
            else:
                raise InputError(
                    f"has the keys {', '.join(line)}; a log has {sorted(HEADER_KEYS)} first, then {sorted(LINE_KEYS)}"
                )
        except InputError as error:
            raise InputError(f"{log} line {number}: {error}") from error
    return [part for part in parts if part.num_lines]


def _records_of(part: LogPart, model: Model, log: Path, file: BinaryIO) -> Iterator[Recorded]:
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


def _origin_of(header: dict[str, Any]) -> Origin:
    """Returns what bits depend on, as a header says."""
    try:
        fingerprint = header["fingerprint"]
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
        engine = EngineConfig(**{**header["engine"], "schedule": schedule_of(fingerprint)})
        return Origin(digest, fingerprint, dict(header["text"]), SamplingParams(), engine, source="", sha256="")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"is no header that this version can read: {error!r}") from error
