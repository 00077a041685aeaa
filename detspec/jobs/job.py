"""A batch job: prompts in, completions out. It may be killed and started again at any moment.

1. `read_lines` checks every line. A malformed one ends the job before generation, unless such lines are to be rejected.
2. The journal holds completions of earlier starts. The job generates the others and appends each to the journal.
3. The output is assembled from the journal in input order. Statistics and manifest, then the output itself, get their
   final names by one `os.replace` each; then the journal is deleted.

Of processes that share a mesh, the first writes journal and results, and the others run what it runs. Both sides exchange, in
this order: what the job is, whether its output is already complete, which requests the journal holds, at the end the outcome.

The output holds deterministic facts alone, so it is byte-identical across batch sizes, orders of arrival, kills and resumes.
Timings and counters go to `*.stats.json`; `*.manifest.json` lists what the bits depend on.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from detspec.engine.engine import Engine
from detspec.errors import InputError
from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, journal_path, new_files, remove_leftovers, sibling
from detspec.jobs.generation import Stopped, StopSignals, Workload, generate
from detspec.jobs.journal import Journal, open_journal
from detspec.jobs.lines import Output
from detspec.jobs.manifest import complete_manifest, differences, job_header, job_manifest
from detspec.jobs.output import MOST_NAMED, JobResult, check_free, counts_of, line_id, put_together
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import JobLines, read_lines
from detspec.progress import Progress

Outcome = tuple[int, int]  # failed completions and rejected lines


class Unfinished(Exception):
    """The job ended before its output was whole; the same command resumes it. `exit_code` is for the process."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def unfinished_if_stopped(where: Path, what_is_kept: Callable[[], str]) -> Iterator[None]:
    """Raises `Unfinished`, which says `what_is_kept`, if a signal stops the block, or the disk of `where` is full."""
    try:
        yield
    except Stopped as stopped:
        raise Unfinished(f"{stopped}: {what_is_kept()}", stopped.exit_code) from stopped
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        why = f"error: cannot write {error.filename or where}: {error.strerror}"
        raise Unfinished(f"{why}: {what_is_kept()}", NO_ROOM_CODE) from error


def run_job(
    engine: Engine, spec: JobSpec, out: Path, *, fresh: bool = False, load_s: float = 0.0, signals: StopSignals | None = None
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

    def what_is_kept() -> str:
        return f"{kept} are kept in {journal_path(out)}, and the same command resumes"

    with unfinished_if_stopped(out, what_is_kept), contextlib.ExitStack() as stack, Progress(0, "completions") as progress:
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


def stream_job(engine: Engine, spec: JobSpec, file: BinaryIO, *, signals: StopSignals | None = None) -> JobResult:
    """Generates everything without a journal; writes each line to `file` as soon as all lines before it are done.

    Of processes that share a mesh, the first alone writes.
    """
    check_same_job(engine, job_header(engine, spec))
    with Progress(0, "completions", shown=engine.agreement.is_first) as progress:
        progress.stage("reading the prompts", at_once=True)
        with read_lines(engine, spec) as reading:
            return _stream(engine, reading, file, progress, signals or StopSignals())


def _stream(engine: Engine, reading: JobLines, file: BinaryIO, progress: Progress, signals: StopSignals) -> JobResult:
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

    work = Workload(reading.todo(), reading.reader, found.num_completions, found.needs)
    stats = generate(engine, work, write, progress, signals)
    stats = {"num_requests": found.num_requests, "num_tokens": num_tokens, "num_resumed": 0, "last_start": stats}
    return JobResult(stats, len(failed), tuple(failed[:MOST_NAMED]), 0)


def fill(journal: Journal, engine: Engine, reading: JobLines, progress: Progress, signals: StopSignals) -> dict[str, Any]:
    """Generates what is not in the journal, and appends it; returns statistics."""

    def keep(number: int, output: Output) -> None:
        journal.add(number, output)
        journal.flush()
        progress.finished()

    num_todo = journal.num_todo
    found = reading.found
    work = Workload(reading.todo(journal.has), reading.reader, num_todo, found.needs)
    progress.count(found.num_completions - num_todo, found.num_completions)
    return generate(engine, work, keep, progress, signals)


# Processes that share a mesh -----------------------------------------------------------------------------------------------


def check_same_job(engine: Engine, header: Mapping[str, Any]) -> None:
    """Raises `InputError` unless all processes were given the job with `header`: the same prompts, options and model."""
    headers = [json.loads(content) for content in engine.agreement.exchange(json.dumps(header).encode())]
    for process, other in enumerate(headers):
        if other != headers[0]:
            parts = "; ".join(differences(other, headers[0], them=f"process {process}", us="process 0"))
            raise InputError(
                f"processes that share a mesh need the same job: {parts}. Start all with the same command, files and machines; "
                "processes that are to run apart need JAX_NUM_PROCESSES=1"
            )


def tell(engine: Engine, outcome: Outcome | None) -> None:
    """Tells the others the `outcome` of the job, or that it is still to come."""
    engine.agreement.exchange(json.dumps(outcome).encode())


@contextlib.contextmanager
def refusals_told(engine: Engine) -> Iterator[None]:
    """Tells the others if the first process refuses the job, in place of the outcome: they would wait for it."""
    try:
        yield
    except InputError as error:
        engine.agreement.exchange(json.dumps(str(error)).encode())
        raise


def tell_kept(engine: Engine, kept: Sequence[bool]) -> None:
    """Tells the others which requests of the shard need not be generated, because all their completions are kept."""
    engine.agreement.exchange(np.packbits(np.asarray(kept, bool)).tobytes())


def follow(engine: Engine, spec: JobSpec, signals: StopSignals) -> Outcome:
    """Generates what the first process does not keep, and writes nothing; returns the outcome.

    Raises `InputError` if a line is malformed or the first process refuses the job, and `Stopped` if a signal arrived at any
    process.
    """
    if (outcome := _told(engine)) is not None:
        return outcome

    def pass_over(number: int, output: Output) -> None:
        """The first process keeps it."""

    with read_lines(engine, spec) as reading:
        found = reading.found
        content = np.frombuffer(engine.agreement.exchange(b"")[0], np.uint8)
        kept = np.unpackbits(content, count=len(found.counts)).astype(bool).tolist()
        num_todo = sum(count for count, is_kept in zip(found.counts, kept, strict=True) if not is_kept)
        work = Workload(reading.todo(lambda number: kept[number - found.first]), reading.reader, num_todo, found.needs)
        with Progress(num_todo, "completions", shown=False) as progress:
            generate(engine, work, pass_over, progress, signals)
    outcome = _told(engine)
    assert outcome is not None
    return outcome


def _told(engine: Engine) -> Outcome | None:
    """Returns what the first process told; raises `InputError` if it refuses the job."""
    outcome = json.loads(engine.agreement.exchange(b"")[0])
    if isinstance(outcome, str):
        raise InputError(outcome)
    return None if outcome is None else (outcome[0], outcome[1])
