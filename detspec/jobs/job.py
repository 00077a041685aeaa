"""A batch job: prompts in, completions out. It may be killed and started again at any moment.

1. `scan` checks every line. One malformed line ends the job before generation, unless such lines are to be rejected.
2. The journal holds completions of earlier starts. The job generates the others and appends each to the journal.
3. The output is assembled from the journal in input order. Statistics and manifest, then the output itself, get their
   final names by one `os.replace` each; then the journal is deleted.

The output holds deterministic facts alone, so it is byte-identical across batch sizes, orders of arrival, kills and resumes.
Timings and counters go to `*.stats.json`; `*.manifest.json` lists what the bits depend on.
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any, BinaryIO

from detspec.engine.engine_group import AnyEngine
from detspec.engine.request import Completion, Request
from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, journal_path, new_files, pretty_json, sibling
from detspec.jobs.follow import check_same_job, follow, tell, tell_kept
from detspec.jobs.generation import generate
from detspec.jobs.journal import Journal, open_journal
from detspec.jobs.lines import completion_line
from detspec.jobs.manifest import complete_manifest, job_header, job_manifest
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.jobs.scan import Scan, requests, scan
from detspec.jobs.signals import Stopped, StopSignals
from detspec.progress import Progress

MOST_NAMED = 10


@dataclasses.dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    # content of `*.stats.json`: counts of the whole job, completions kept from earlier starts (`num_resumed`), and times and
    # counters of the start that finished it (`last_start`). Empty if there was nothing to do.
    stats: dict[str, Any]
    num_failed: int  # completions with finish reason "error"
    failed: tuple[str, ...]  # ids of the first failed completions, where the results are written
    num_rejected: int  # malformed lines


class Unfinished(Exception):
    """The job ended before its output was whole; the same command resumes it. `exit_code` is for the process."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_job(
    engine: AnyEngine, spec: JobSpec, out: Path, *, fresh: bool = False, load_s: float = 0.0, signals: StopSignals | None = None
) -> JobResult:
    """Generates what is not yet in the journal of `out`, this shard's output; writes `out`, its statistics and its manifest.

    `fresh` ignores an existing journal or output, and starts over. `load_s`, the seconds that loading the model took, goes into
    the statistics. `signals` were entered by the caller. Of processes that share a mesh, the first alone writes files.

    Raises `InputError` if a line is malformed, or the journal belongs to another job, is damaged or is in use, and `Unfinished`
    if a signal arrived, or the disk is full.
    """
    header = job_header(engine, spec)
    check_same_job(engine, header)
    if not engine.agreement.is_first:
        num_failed, num_rejected = follow(engine, spec, signals or StopSignals())
        return JobResult({}, num_failed, (), num_rejected)
    done = None if fresh else complete_manifest(out, header)
    if done is not None:
        if journal_path(out).exists():  # the job was killed right before its last action
            with open_journal(journal_path(out), header) as journal:
                journal.remove()
        outcome = (done["output"]["num_failed"], done["prompts"]["num_rejected"])
        tell(engine, outcome)
        return JobResult({}, outcome[0], (), outcome[1])
    kept = "what was finished"
    try:
        with open_journal(journal_path(out), header, fresh=fresh) as journal:
            tell(engine, None)
            began = time.perf_counter()
            found = scan_into(engine, spec, out)
            journal.load(found.first, found.counts)
            tell_kept(engine, [journal.has(found.first + place) for place in range(len(found.counts))])
            num_resumed = journal.num_kept
            scan_s = time.perf_counter() - began
            try:
                stats = fill(journal, engine, spec, found, signals or StopSignals())
            finally:
                journal.sync()
                kept = f"{journal.num_kept} of {found.num_completions} completions"
            last_start = {"load_s": round(load_s, 3), "scan_s": round(scan_s, 3), **stats}
            stats = {"num_resumed": num_resumed, "last_start": last_start}
            result = put_together(journal, out, engine, spec.prompts, found, header, stats)
            journal.remove()
            tell(engine, (result.num_failed, result.num_rejected))
            return result
    except Stopped as stopped:
        why = str(stopped)
        code = stopped.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        why = f"error: cannot write {error.filename or out}: {error.strerror}"
        code = NO_ROOM_CODE
    raise Unfinished(f"{why}: {kept} are kept in {journal_path(out)}, and the same command resumes", code)


def stream_job(engine: AnyEngine, spec: JobSpec, file: BinaryIO, *, signals: StopSignals | None = None) -> JobResult:
    """Generates everything without a journal; writes each line to `file` as soon as all lines before it are done.

    Of processes that share a mesh, the first alone writes.
    """
    check_same_job(engine, job_header(engine, spec))
    found = scan(engine, spec)
    waiting: dict[tuple[int, int], bytes] = {}
    following = found.first, 0
    failed: list[str] = []
    num_tokens = 0

    def write(number: int, request: Request, completion: Completion) -> None:
        nonlocal following, num_tokens
        waiting[number, completion.index] = completion_line(completion, request.sampling.n) + b"\n"
        num_tokens += len(completion.token_ids)
        if completion.finish_reason == "error":
            failed.append(completion.id)
        while following in waiting:
            line = waiting.pop(following)
            if engine.agreement.is_first:
                file.write(line)
            number, index = following
            following = (number, index + 1) if index + 1 < found.counts[number - found.first] else (number + 1, 0)
        file.flush()

    with Progress(found.num_completions, "requests", shown=engine.agreement.is_first) as progress:
        signals = signals or StopSignals()
        todo = requests(engine, spec, found)
        num_todo = found.num_completions
        stats = generate(engine, todo, num_todo, write, progress, signals, needs=found.needs)
    stats = {"num_requests": found.num_requests, "num_tokens": num_tokens, "num_resumed": 0, "last_start": stats}
    return JobResult(stats, len(failed), tuple(failed[:MOST_NAMED]), 0)


def scan_into(engine: AnyEngine, spec: JobSpec, out: Path) -> Scan:
    """Scans; if the job rejects malformed lines, writes them to the `rejects` file next to `out`."""
    if spec.on_error == "stop":
        return scan(engine, spec)
    with new_files(sibling(out, "rejects")) as (file,):
        return scan(engine, spec, reject=file.write)


def fill(journal: Journal, engine: AnyEngine, spec: JobSpec, found: Scan, signals: StopSignals) -> dict[str, Any]:
    """Generates what is not in the journal, and appends it; returns statistics."""
    todo = requests(engine, spec, found, is_done=journal.has)

    def keep(number: int, request: Request, completion: Completion) -> None:
        num_tokens = len(completion.token_ids)
        reason = completion.finish_reason
        line = completion_line(completion, request.sampling.n)
        journal.add(number, completion.index, num_tokens=num_tokens, finish_reason=reason, line=line)
        journal.flush()

    num_todo = journal.num_todo
    with Progress(found.num_completions, "requests", done=found.num_completions - num_todo) as progress:
        return generate(engine, todo, num_todo, keep, progress, signals, needs=found.needs)


def put_together(
    journal: Journal, out: Path, engine: AnyEngine, prompts: Prompts, found: Scan, header: dict[str, Any], stats: dict[str, Any]
) -> JobResult:
    """Writes `out`, statistics and manifest from a complete journal."""
    places = journal.failed
    failed: list[str] = []
    digest = hashlib.sha256()
    with new_files(out, sibling(out, "stats"), sibling(out, "manifest")) as (out_file, stats_file, manifest_file):
        for place, line in enumerate(journal.lines()):
            out_file.write(line)
            digest.update(line)
            if place in places and len(failed) < MOST_NAMED:
                failed.append(json.loads(line)["id"])
        counts = {
            "num_requests": found.num_requests,
            "num_rejected": found.num_rejected,
            "num_prompt_tokens": found.num_prompt_tokens,
            "num_tokens": journal.num_tokens,
            "num_failed": len(places),
        }
        stats = {**counts, **stats}
        stats_file.write(pretty_json(stats))
        output = {"sha256": digest.hexdigest(), "bytes": out_file.tell(), "num_failed": len(places)}
        manifest_file.write(pretty_json(job_manifest(header, engine, prompts, found, output)))
    if not found.num_rejected:
        sibling(out, "rejects").unlink(missing_ok=True)  # empty, or left by an earlier job
    return JobResult(stats, len(places), tuple(failed), found.num_rejected)
