"""Audit of a job's output: every record is replayed through the canonical pass and compared bit for bit.

1. The manifest next to the records names their model, schedule and sampling; the file of prompts holds the requests.
2. The replayer reads the recorded tokens, teacher-forced. At each position it gives the canonical token.
3. `difference_of` derives the canonical completion, and names the first place where the record differs from it.

Up to the first difference the record is the canonical text, so nothing has to be generated. An aborted record holds fewer
tokens than the canonical completion, and differs where it ends. A failed request has no tokens, and is counted apart. OpenAI's
lines need not hold tokens: `audit_lines` answers them again.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from detspec.checkpoint.conversation import template_time
from detspec.checkpoint.load import Model
from detspec.engine.replayer import Replayer
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.jobs.audit_lines import NOTHING, audit_lines, first_difference
from detspec.jobs.audit_report import AuditReport, Difference
from detspec.jobs.difference import difference_of
from detspec.jobs.files import STDIO
from detspec.jobs.origin import Origin, check_model, machine_differences, read_origin
from detspec.jobs.records import PromptsById, Record, read_records
from detspec.progress import Progress


class Recorded(NamedTuple):
    """A record, the request of one sample that it answers, and the metadata of the line of input."""

    record: Record
    request: Request
    metadata: dict[str, Any] | None = None


def run_audit(model: Model, records: Path, *, prompts: Path | None = None, max_requests: int = 32) -> AuditReport:
    """Replays the output `records` of a job, which has its manifest in the same folder, `max_requests` of them together.

    `prompts` are the job's file of prompts; by default the one that the manifest names.

    Raises `InputError` if files are missing or malformed, a record has no prompt, or `model` is not the manifest's.
    """
    origin = read_origin(records)
    check_model(origin, model)
    if prompts is None:
        if origin.source == STDIO:
            raise InputError("the job read its prompts from the standard input: name their file with --prompts")
        prompts = Path(origin.source)
    columns = {"column": origin.column, "id_column": origin.id_column}
    now = template_time(origin.created)
    opened = PromptsById(prompts, origin.sha256, **columns, is_openai=origin.is_openai, now=now)
    with opened as asked, Progress(_count_lines(records), "records") as progress:
        if origin.is_openai:
            report = audit_lines(model, records, asked, origin, max_requests=max_requests, progress=progress)
        else:
            requests = _asked(model, records, asked, origin)
            report = audit_records(model, origin, requests, max_requests=max_requests, progress=progress)
    if not report.num_records + report.num_ordinary + report.num_failed:
        raise InputError(f"{records} holds no records")
    return report


def audit_records(
    model: Model, origin: Origin, records: Iterable[Recorded], *, max_requests: int, progress: Progress
) -> AuditReport:
    """Replays `records` of `origin`, and compares them; see `run_audit`."""
    replayer = Replayer(model, dataclasses.replace(origin.engine, max_requests=max_requests, num_pages=None))
    report = AuditReport(machine=machine_differences(origin, replayer.mesh))
    waiting: deque[Recorded] = deque()
    progress.stage("compiling and certifying", at_once=True)
    replayer.prepare()
    progress.stage("replaying", at_once=True)
    began = time.perf_counter()
    for replay in replayer.run(_to_replay(records, waiting, report, progress)):
        record, request, metadata = waiting.popleft()
        found = difference_of(record, request, replay, model, origin.digest) or metadata_difference(record, metadata)
        report.num_tokens += len(record.token_ids)
        if not request.sampling.deterministic:
            report.num_ordinary += 1
            report.num_ordinary_reproduced += found is None
        else:
            report.num_records += 1
            report.differences += [] if found is None else [found]
        progress.finished()
        progress.segment(len(record.token_ids), len(waiting))
    report.replay_s = time.perf_counter() - began
    return report


def metadata_difference(record: Record, metadata: dict[str, Any] | None) -> Difference | None:
    """Finds where a record's metadata part from those of its line of input; None if they are equal."""
    recorded, canonical = (NOTHING if value is None else value for value in (record.metadata, metadata))
    what = first_difference(recorded, canonical, "metadata")
    return None if what is None else Difference(record.name, None, what)


def _to_replay(
    records: Iterable[Recorded], waiting: deque[Recorded], report: AuditReport, progress: Progress
) -> Iterator[tuple[Request, Sequence[int]]]:
    """Yields requests and tokens for the replayer; appends `records` to `waiting`, but counts failed ones in `report`."""
    for asked in records:
        if asked.record.has_failed:
            report.num_failed += 1
            progress.finished()
            continue
        waiting.append(asked)
        record, request, _ = asked
        yield request, request.given_token_ids or record.token_ids[: request.sampling.max_tokens]


def _asked(model: Model, records: Path, prompts: PromptsById, origin: Origin) -> Iterator[Recorded]:
    """The records of a job, each with the sample that it answers."""
    seen: set[str] = set()
    for record in read_records(records, model.cfg.vocab_size):
        if record.name in seen:
            raise InputError(f"{records}: the record {record.name!r} occurs twice")
        seen.add(record.name)
        request, metadata = prompts.asked(record.id, model, origin.engine, origin.sampling)
        yield Recorded(record, sample_of(request, record), metadata)


def sample_of(request: Request, record: Record) -> Request:
    """The sample of `request` that the index of `record` names; `InputError` if there is none."""
    n = request.sampling.n
    numbers = (None,) if n == 1 else range(n)
    if record.index not in numbers:
        known = "no index" if n == 1 else f"an index in 0 .. {n - 1}"
        raise InputError(f"the record {record.id!r} has index {record.index}, but its request has n = {n}: accepted is {known}")
    return next(itertools.islice(request.samples(), record.index or 0, None))


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for raw in file if raw.strip())
    except OSError as error:
        raise InputError(f"--records {path}: {error.strerror}") from error
