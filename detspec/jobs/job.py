"""A batch job: prompts in, completions out, and at any moment it may end and be started again.

1. `scan` checks every line; nothing is generated if one is bad, unless bad lines are to be rejected.
2. What an earlier start of the job finished is in the journal; the rest is generated, and each completion goes there.
3. The output is put together from the journal in input order. Statistics and manifest, then the output itself, take their
   final names in one `os.replace` each, and the journal goes.

The output holds deterministic facts only, so it is byte-identical across batch sizes, orders of arrival, kills and resumes;
timings and counters go to `*.stats.json`, what the bits depend on to `*.manifest.json`.
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any, BinaryIO

from detspec.engine.engine import Engine
from detspec.engine.request import Completion, Request
from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, journal_path, new_files, pretty_json, sibling
from detspec.jobs.generation import generate
from detspec.jobs.journal import Journal, open_journal
from detspec.jobs.lines import completion_line
from detspec.jobs.manifest import complete_manifest, job_header, job_manifest
from detspec.jobs.prompts import Prompts
from detspec.jobs.scan import Scan, requests, scan
from detspec.jobs.signals import Stopped, StopSignals
from detspec.progress import Progress
from detspec.sampling_params import SamplingParams

MOST_NAMED = 10
UNSHARDED = (0, 1)


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What a job came to.

    Attributes:
        stats: what `*.stats.json` holds: counts of the whole job, completions that earlier starts had kept (`num_resumed`), and
            under `last_start` times and counters of the start that finished it; empty if there was nothing to do.
        num_failed: completions with finish reason "error".
        failed: ids of the first of them.
        num_rejected: lines that are no requests.
    """

    stats: dict[str, Any]
    num_failed: int
    failed: tuple[str, ...]
    num_rejected: int


class Unfinished(Exception):
    """The job ended before its output was whole, and the same command resumes it; the process exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        """`message` says why, and what is kept."""
        super().__init__(message)
        self.exit_code = exit_code


def run_job(
    engine: Engine,
    prompts: Prompts,
    out: Path,
    *,
    defaults: SamplingParams,
    shard: tuple[int, int] = UNSHARDED,
    on_error: str = "stop",
    fresh: bool = False,
    load_s: float = 0.0,
    signals: StopSignals | None = None,
) -> JobResult:
    """Generates what is not in the journal of `out`, and writes `out`, its statistics and its manifest.

    Args:
        engine: generates.
        prompts: the file of prompts.
        out: the output of this shard.
        defaults: sampling parameters that lines do not give.
        shard: index and number of shards.
        on_error: "stop" raises at a malformed line; "reject" puts it into `*.rejects.jsonl` and goes on.
        fresh: begin anew, whatever journal or output is there.
        load_s: seconds that loading the model took, for the statistics.
        signals: entered by the caller.

    Raises:
        InputError: a line is malformed, or the journal belongs to another job, is damaged or in use.
        Unfinished: a signal came, or the disk is full.
    """
    header = job_header(engine, prompts, defaults, shard=shard, on_error=on_error)
    done = None if fresh else complete_manifest(out, header)
    if done is not None:
        if journal_path(out).exists():  # the job was killed right before its last act
            with open_journal(journal_path(out), header) as journal:
                journal.remove()
        return JobResult({}, done["output"]["num_failed"], (), done["prompts"]["num_rejected"])
    kept = "what was finished"
    try:
        with open_journal(journal_path(out), header, fresh=fresh) as journal:
            began = time.perf_counter()
            found = scan_into(prompts, engine, defaults, out, shard=shard, on_error=on_error)
            journal.load(found.first, found.counts)
            num_resumed = journal.num_kept
            scan_s = time.perf_counter() - began
            try:
                stats = fill(journal, engine, prompts, defaults, found, signals or StopSignals())
            finally:
                journal.sync()
                kept = f"{journal.num_kept} of {found.num_completions} completions"
            last_start = {"load_s": round(load_s, 3), "scan_s": round(scan_s, 3), **stats}
            stats = {"num_resumed": num_resumed, "last_start": last_start}
            result = put_together(journal, out, engine, prompts, found, header, stats)
            journal.remove()
            return result
    except Stopped as stopped:
        why, code = str(stopped), stopped.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        why, code = f"error: cannot write {error.filename or out}: {error.strerror}", NO_ROOM_CODE
    raise Unfinished(f"{why}: {kept} are kept in {journal_path(out)}, and the same command resumes", code)


def stream_job(
    engine: Engine,
    prompts: Prompts,
    file: BinaryIO,
    *,
    defaults: SamplingParams,
    shard: tuple[int, int] = UNSHARDED,
    signals: StopSignals | None = None,
) -> JobResult:
    """Generates everything, and writes each line into `file` as soon as those before it are done; nothing is kept."""
    found = scan(prompts, engine, defaults, shard=shard)
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
            file.write(waiting.pop(following))
            number, index = following
            following = (number, index + 1) if index + 1 < found.counts[number - found.first] else (number + 1, 0)
        file.flush()

    with Progress(found.num_completions, "requests") as progress:
        todo = requests(prompts, engine, defaults, found)
        stats = generate(
            *(engine, todo, found.num_completions, write, progress, signals or StopSignals()), deterministic=found.deterministic
        )
    stats = {"num_requests": found.num_requests, "num_tokens": num_tokens, "num_resumed": 0, "last_start": stats}
    return JobResult(stats, len(failed), tuple(failed[:MOST_NAMED]), 0)


def scan_into(
    prompts: Prompts, engine: Engine, defaults: SamplingParams, out: Path, *, shard: tuple[int, int], on_error: str
) -> Scan:
    """A scan whose malformed lines go into a file beside `out`, which is not there if there are none."""
    if on_error == "stop":
        return scan(prompts, engine, defaults, shard=shard)
    with new_files(sibling(out, "rejects")) as (file,):
        found = scan(prompts, engine, defaults, shard=shard, reject=file.write)
    return found


def fill(
    journal: Journal, engine: Engine, prompts: Prompts, defaults: SamplingParams, found: Scan, signals: StopSignals
) -> dict[str, Any]:
    """Generates what is not in the journal; returns statistics of doing so."""
    todo = requests(prompts, engine, defaults, found, is_done=journal.has)

    def keep(number: int, request: Request, completion: Completion) -> None:
        num_tokens, reason = len(completion.token_ids), completion.finish_reason
        line = completion_line(completion, request.sampling.n)
        journal.add(number, completion.index, num_tokens=num_tokens, finish_reason=reason, line=line)
        journal.flush()

    num_todo = journal.num_todo
    with Progress(found.num_completions, "requests", done=found.num_completions - num_todo) as progress:
        return generate(engine, todo, num_todo, keep, progress, signals, deterministic=found.deterministic)


def put_together(
    journal: Journal, out: Path, engine: Engine, prompts: Prompts, found: Scan, header: dict[str, Any], stats: dict[str, Any]
) -> JobResult:
    """Writes `out` from a journal that holds everything, and what belongs beside it."""
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
        sibling(out, "rejects").unlink(missing_ok=True)  # of none, or of an earlier job
    return JobResult(stats, len(places), tuple(failed), found.num_rejected)
