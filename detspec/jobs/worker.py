"""A worker of a job without fixed shards: takes chunks of lines until all are done, by it or by others.

The first workers scan the prompts and store what they found; later ones read it. What a worker does then is in `share`, and
`merge` joins the journals.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from detspec.engine.engine import Engine
from detspec.errors import InputError
from detspec.jobs.chunk_folder import STALE_S, ChunkFolder, WorkerClock, chunk_folder, worker_name
from detspec.jobs.chunks import ChunkedLines, cut, load, store
from detspec.jobs.files import new_file_once, new_files, pretty_json
from detspec.jobs.generation import StopSignals, Workload, generate
from detspec.jobs.job import unfinished_if_stopped
from detspec.jobs.journal import open_journal
from detspec.jobs.manifest import HEADER_KEYS, complete_manifest, differences, job_header, job_manifest
from detspec.jobs.output import JobResult, check_free
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import read_lines
from detspec.jobs.share import Share
from detspec.progress import Progress
from detspec.read_json import read_json_object
from detspec.say import say, stamped

JOB = "job.json"
REJECTS = "rejects.jsonl"


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """How a worker works; none of it changes a bit.

    Attributes:
        double_check: share of the chunks that are done twice, 0 .. 1.
        chunk_lines: lines of a chunk; by default as few as leaves 4096 chunks.
        name: this worker's name; a new one if None.
        clock: the worker's clock.
        stale_s: age of a heartbeat after which its worker counts as gone.
        has_heartbeat: a thread shows that it lives; else its clock's owner does.
    """

    double_check: float = 0.0
    chunk_lines: int | None = None
    name: str | None = None
    clock: WorkerClock = dataclasses.field(default_factory=WorkerClock)
    stale_s: float = STALE_S
    has_heartbeat: bool = True


def run_worker(
    engine: Engine,
    spec: JobSpec,
    out: Path,
    options: WorkerOptions = WorkerOptions(),
    *,
    load_s: float = 0.0,
    signals: StopSignals | None = None,
) -> JobResult:
    """Does chunks of the job whose output will be `out`, until all are done; `merge` then writes that.

    Statistics are empty if there was nothing to do. Raises `InputError` if a line is malformed, or `out` or the folder belongs
    to another job, and `Unfinished` if a signal arrived, or the disk is full.
    """
    header = job_header(engine, spec)
    done = complete_manifest(out, header)
    if done is not None:
        return JobResult({}, done["output"]["num_failed"], (), done["prompts"]["num_rejected"])
    check_free(out, header, "name another --out, or remove it")
    name = options.name or worker_name()
    folder = ChunkFolder(chunk_folder(out), name, clock=options.clock, stale_s=options.stale_s)
    rest = f"what {name} finished is kept in {folder.path}, and other workers go on with the rest"
    with unfinished_if_stopped(folder.path, lambda: rest), contextlib.ExitStack() as stack:
        if options.has_heartbeat:
            stack.enter_context(folder.alive())
        else:
            folder.beat()
        say(stamped(name, f"takes chunks in {folder.path}"))
        progress = stack.enter_context(Progress(0, "completions", worker=name))
        began = time.perf_counter()
        progress.stage("reading the prompts", at_once=True)
        chunks = _obtain(engine, spec, folder, header, options.chunk_lines)
        folder.forget_lost()
        scan_s = round(time.perf_counter() - began, 3)
        journal = stack.enter_context(open_journal(folder.file("journal"), header))
        journal.load(0, chunks.found.counts)
        share = Share(engine, spec, folder, chunks, journal, options.double_check, progress)
        if share.is_over():
            journal.remove()
            return JobResult({}, 0, (), chunks.found.num_rejected)
        work = Workload(share.lines(), share.reader, chunks.found.num_completions, chunks.found.needs, share.is_over)
        stats = generate(engine, work, share.keep, progress, signals or StopSignals())
        stats = {"worker": name, "num_chunks": share.num_finished, "load_s": round(load_s, 3), "scan_s": scan_s, **stats}
        with new_files(folder.file("stats.json")) as (file,):
            file.write(pretty_json(stats))
        counts = {"num_requests": chunks.found.num_requests, "num_tokens": journal.num_tokens, "num_resumed": 0}
        return JobResult({**counts, "last_start": stats}, journal.num_failed, (), chunks.found.num_rejected)


def read_job(folder: Path) -> dict[str, Any] | None:
    """The manifest of a job, without its output, that the first worker stored in `folder`; None if there is none yet."""
    return read_json_object(folder / JOB)


def _obtain(engine: Engine, spec: JobSpec, folder: ChunkFolder, header: dict[str, Any], size: int | None) -> ChunkedLines:
    """The chunks of the job, scanned by this worker unless another one has.

    Raises `InputError` if the folder belongs to another job, or chunks have another size.
    """
    job = read_job(folder.path)
    if job is None:
        with read_lines(engine, spec, keep=False) as reading, new_files(folder.path / REJECTS) as (rejects,):
            rejects.writelines(reading.rejects)
            found = reading.found
        chunks = cut(spec.prompts, found, size)
        store(folder.path, chunks)
        mine = {**job_manifest(header, engine, spec.prompts, found), "chunk_lines": chunks.size}
        if new_file_once(folder.path / JOB, pretty_json(mine)):
            return chunks
        job = read_job(folder.path) or mine  # another worker was first
    chunks = load(folder.path, job["chunk_lines"])
    theirs = {**{key: job.get(key) for key in HEADER_KEYS}, "max_len": job["engine"].get("max_len")}  # it decides what is sound
    ours = {**{key: header.get(key) for key in HEADER_KEYS}, "max_len": engine.config.max_len}
    theirs["prompts"] = job["prompts"]["sha256"]
    if size is not None and size != chunks.size:
        raise InputError(f"{folder.path} has chunks of {chunks.size} lines, this worker was told {size}: leave the option out")
    if parts := differences(theirs, ours, them="its job", us="this worker"):
        raise InputError(
            f"{folder.path} belongs to another job: {'; '.join(parts)}. Give all workers the same command, name another --out, "
            "or remove the folder"
        )
    return chunks
