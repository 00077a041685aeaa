"""A batch job: prompts in, completions out. It may be killed and started again at any moment.

1. `read_lines` checks every line. A malformed one ends the job before generation, unless such lines are to be rejected.
2. The journal holds completions of earlier starts. The job generates the others and appends each to the journal.
3. The output is assembled from the journal in input order. Statistics and manifest, then the output itself, get their
   final names by one `os.replace` each; then the journal is deleted.

The output holds deterministic facts alone, so it is byte-identical across batch sizes, orders of arrival, kills and resumes.
Timings and counters go to `*.stats.json`; `*.manifest.json` lists what the bits depend on.
"""

import contextlib
import time
from pathlib import Path
from typing import Any, BinaryIO

from detspec.engine.engine_group import AnyEngine
from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, journal_path, new_files, remove_leftovers, sibling
from detspec.jobs.follow import check_same_job, follow, refusals_told, tell, tell_kept
from detspec.jobs.generation import Work, generate
from detspec.jobs.journal import Journal, open_journal
from detspec.jobs.lines import Output
from detspec.jobs.manifest import complete_manifest, job_header, job_manifest
from detspec.jobs.output import MOST_NAMED, JobResult, counts_of, line_id, put_together
from detspec.jobs.overwrite import check_free
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import Reading, read_lines
from detspec.jobs.signals import Stopped, StopSignals
from detspec.progress import Progress


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

    Raises `InputError` if a line is malformed, `out` or its journal belongs to another job or was changed, or the journal is in
    use, and `Unfinished` if a signal arrived, or the disk is full.
    """
    header = job_header(engine, spec)
    check_same_job(engine, header)
    if not engine.agreement.is_first:
        num_failed, num_rejected = follow(engine, spec, signals or StopSignals())
        return JobResult({}, num_failed, (), num_rejected)
    with refusals_told(engine):
        done = None if fresh else complete_manifest(out, header)
        if done is None and not fresh:
            check_free(out, header)
        if done is not None and journal_path(out).exists():  # the job was killed right before its last action
            with open_journal(journal_path(out), header) as journal:
                journal.remove()
    if done is not None:
        outcome = (done["output"]["num_failed"], done["prompts"]["num_rejected"])
        tell(engine, outcome)
        return JobResult({}, outcome[0], (), outcome[1])
    kept = "what was finished"
    try:
        with contextlib.ExitStack() as stack, Progress(0, "requests") as progress:
            with refusals_told(engine):
                journal = stack.enter_context(open_journal(journal_path(out), header, fresh=fresh))
            tell(engine, None)
            remove_leftovers(out, *(sibling(out, what) for what in ("errors", "stats", "manifest", "rejects")))
            began = time.perf_counter()
            progress.stage("reading the prompts", at_once=True)
            reading = stack.enter_context(read_lines(engine, spec, out.parent))
            found = reading.found
            if spec.on_error == "reject":
                with new_files(sibling(out, "rejects")) as (file,):
                    file.writelines(reading.rejects)
            journal.load(found.first, found.counts)
            tell_kept(engine, [journal.has(found.first + place) for place in range(len(found.counts))])
            num_resumed = journal.num_kept
            scan_s = time.perf_counter() - began
            try:
                stats = fill(journal, engine, reading, progress, signals or StopSignals())
            finally:
                journal.sync()
                kept = f"{journal.num_kept} of {found.num_completions} completions"
            progress.stage("writing the output")
            last_start = {"load_s": round(load_s, 3), "scan_s": round(scan_s, 3), **stats}
            counts = counts_of(found, num_tokens=journal.num_tokens, num_failed=journal.num_failed)
            stats = {**counts, "num_resumed": num_resumed, "last_start": last_start}
            manifest = job_manifest(header, engine, spec.prompts, found)
            splits = spec.is_openai and bool(journal.num_failed)
            result = put_together(out, journal.outputs(), manifest, stats, splits=splits)
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
    with Progress(0, "requests", shown=engine.agreement.is_first) as progress:
        progress.stage("reading the prompts", at_once=True)
        with read_lines(engine, spec) as reading:
            return _stream(engine, reading, file, progress, signals or StopSignals())


def _stream(engine: AnyEngine, reading: Reading, file: BinaryIO, progress: Progress, signals: StopSignals) -> JobResult:
    found = reading.found
    progress.count(0, found.num_completions)
    waiting: dict[tuple[int, int], bytes] = {}
    following = found.first, 0
    failed: list[str] = []
    num_tokens = 0

    def write(number: int, output: Output) -> None:
        nonlocal following, num_tokens
        progress.finished()
        waiting[number, output.index] = output.line + b"\n"
        num_tokens += output.num_tokens
        if output.finish_reason == "error":
            failed.append(line_id(output.line))
        while following in waiting:
            line = waiting.pop(following)
            if engine.agreement.is_first:
                file.write(line)
            number, index = following
            following = (number, index + 1) if index + 1 < found.counts[number - found.first] else (number + 1, 0)
        file.flush()

    work = Work(reading.todo(), reading.reader, found.num_completions, found.needs)
    stats = generate(engine, work, write, progress, signals)
    stats = {"num_requests": found.num_requests, "num_tokens": num_tokens, "num_resumed": 0, "last_start": stats}
    return JobResult(stats, len(failed), tuple(failed[:MOST_NAMED]), 0)


def fill(journal: Journal, engine: AnyEngine, reading: Reading, progress: Progress, signals: StopSignals) -> dict[str, Any]:
    """Generates what is not in the journal, and appends it; returns statistics."""

    def keep(number: int, output: Output) -> None:
        journal.add(number, output)
        journal.flush()
        progress.finished()

    num_todo = journal.num_todo
    found = reading.found
    work = Work(reading.todo(journal.has), reading.reader, num_todo, found.needs)
    progress.count(found.num_completions - num_todo, found.num_completions)
    return generate(engine, work, keep, progress, signals)
