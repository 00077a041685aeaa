"""A worker of a job without fixed shards: takes chunks of lines until all are done, by it or by others.

1. The first workers scan the prompts and store what they found; later ones read it.
2. A worker claims a chunk when too few of its requests are in flight, so its engine stays full from chunk to chunk.
3. Each completion goes into the worker's own journal. A chunk is done when all its lines are in journals.
4. A chunk whose workers were killed or frozen is taken again, without the lines that their journals hold. At the end idle
   workers help with what others have not finished, from its last line backwards.

`merge_chunks` joins the journals.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detspec.engine.engine_group import AnyEngine
from detspec.errors import InputError
from detspec.jobs.asked import Asked, Output
from detspec.jobs.chunk_choice import Take, choose, choose_to_help, is_to_check
from detspec.jobs.chunk_folder import STALE_S, ChunkFolder, Clock, chunk_folder, worker_name
from detspec.jobs.files import NO_ROOM, NO_ROOM_CODE, new_file_once, new_files, pretty_json
from detspec.jobs.generation import Work, generate
from detspec.jobs.heartbeat import Heartbeat
from detspec.jobs.job import Unfinished
from detspec.jobs.journal import Journal, line_of, open_journal, sound_lines
from detspec.jobs.manifest import complete_manifest, differences, job_header, job_manifest
from detspec.jobs.output import JobResult
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import make_reader, scan
from detspec.jobs.signals import Stopped, StopSignals
from detspec.jobs.stored_scan import Chunks, cut, load, store
from detspec.progress import Progress
from detspec.read_json import read_json_object

JOB = "job.json"
REJECTS = "rejects.jsonl"
LOOK_S = 2.0  # between two looks at the folder
WAIT_S = 0.5  # until the next look when there is nothing to do
SYNC_S = 1.0  # until chunks that are finished are on disk, and said to be done
MOST_TRIES = 3  # claims that others made first, until the next look
ROOM = ("max_len", "max_stop_ids", "max_logit_bias")  # settings that decide which lines are sound


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """How a worker works; none of it changes a bit.

    Attributes:
        double_check: share of the chunks that are done twice, 0 .. 1.
        chunk_lines: lines of a chunk; by default as few as leaves 4096 chunks.
        name: this worker's name; a new one if None.
        clock: its time.
        stale_s: age of a heartbeat after which its worker counts as gone.
        has_heartbeat: a thread shows that it lives; else its clock's owner does.
    """

    double_check: float = 0.0
    chunk_lines: int | None = None
    name: str | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)
    stale_s: float = STALE_S
    has_heartbeat: bool = True


def run_worker(
    engine: AnyEngine,
    spec: JobSpec,
    out: Path,
    options: WorkerOptions = WorkerOptions(),
    *,
    load_s: float = 0.0,
    signals: StopSignals | None = None,
) -> JobResult:
    """Does chunks of the job whose output will be `out`, until all are done; `merge_chunks` then writes that.

    Statistics are empty if there was nothing to do. Raises `InputError` if a line is malformed, or the folder belongs to
    another job, and `Unfinished` if a signal arrived, or the disk is full.
    """
    header = job_header(engine, spec)
    done = complete_manifest(out, header)
    if done is not None:
        return JobResult({}, done["output"]["num_failed"], (), done["prompts"]["num_rejected"])
    name = options.name or worker_name()
    folder = ChunkFolder(chunk_folder(out), name, clock=options.clock, stale_s=options.stale_s)
    try:
        with contextlib.ExitStack() as stack:
            if options.has_heartbeat:
                stack.enter_context(Heartbeat(folder))
            else:
                folder.beat()
            began = time.perf_counter()
            chunks = _obtain(engine, spec, folder, header, options.chunk_lines)
            folder.forget_lost()
            scan_s = round(time.perf_counter() - began, 3)
            journal = stack.enter_context(open_journal(folder.file("journal"), header))
            journal.load(0, chunks.found.counts)
            with Progress(chunks.found.num_completions, "requests") as progress:
                share = _Share(engine, spec, folder, chunks, journal, options.double_check, progress)
                if share.is_over():
                    journal.remove()
                    return JobResult({}, 0, (), chunks.found.num_rejected)
                work = Work(share.lines(), chunks.found.num_completions, chunks.found.needs, share.is_over)
                stats = generate(engine, work, share.keep, progress, signals or StopSignals())
            stats = {"worker": name, "num_chunks": share.num_finished, "load_s": round(load_s, 3), "scan_s": scan_s, **stats}
            with new_files(folder.file("stats.json")) as (file,):
                file.write(pretty_json(stats))
            counts = {"num_requests": chunks.found.num_requests, "num_tokens": journal.num_tokens, "num_resumed": 0}
            return JobResult({**counts, "last_start": stats}, len(journal.failed), (), chunks.found.num_rejected)
    except Stopped as stopped:
        why = str(stopped)
        code = stopped.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        why = f"error: cannot write {error.filename or folder.path}: {error.strerror}"
        code = NO_ROOM_CODE
    raise Unfinished(f"{why}: what is finished is kept in {folder.path}, and other workers go on with the rest", code)


def read_job(folder: Path) -> dict[str, Any] | None:
    """The manifest of a job, without its output, that the first worker stored in `folder`; None if there is none yet."""
    return read_json_object(folder / JOB)


def _obtain(engine: AnyEngine, spec: JobSpec, folder: ChunkFolder, header: dict[str, Any], size: int | None) -> Chunks:
    """The chunks of the job, scanned by this worker unless another one has.

    Raises `InputError` if the folder belongs to another job, or chunks have another size.
    """
    job = read_job(folder.path)
    if job is None:
        with new_files(folder.path / REJECTS) as (rejects,):
            found = scan(engine, spec, reject=None if spec.on_error == "stop" else rejects.write)
        chunks = cut(spec.prompts, found, size)
        store(folder.path, chunks)
        mine = {**job_manifest(header, engine, spec.prompts, found), "chunk_lines": chunks.size}
        if new_file_once(folder.path / JOB, pretty_json(mine)):
            return chunks
        job = read_job(folder.path) or mine  # another worker was first
    chunks = load(folder.path, job["chunk_lines"])
    theirs = {**{key: job.get(key) for key in header}, "room": {name: job["engine"].get(name) for name in ROOM}}
    ours = {**header, "room": {name: getattr(engine.config, name) for name in ROOM}}
    theirs["prompts"] = job["prompts"]["sha256"]
    if size is not None and size != chunks.size:
        raise InputError(f"{folder.path} has chunks of {chunks.size} lines, this worker was told {size}: leave the option out")
    if parts := differences(theirs, ours, them="its job", us="this worker"):
        raise InputError(
            f"{folder.path} belongs to another job: {'; '.join(parts)}. Give all workers the same command, name another --out, "
            "or remove the folder"
        )
    return chunks


@dataclasses.dataclass(eq=False)
class _Held:
    """A chunk that this worker does: lines of output that are still missing, and who wrote the others."""

    take: Take
    missing: dict[int, set[int]]  # by line of input: indices
    authors: set[str]
    tails: dict[str, int] = dataclasses.field(default_factory=dict)  # how far journals of others were read


class _Share:
    """The part of a job that falls to one worker."""

    def __init__(
        self,
        engine: AnyEngine,
        spec: JobSpec,
        folder: ChunkFolder,
        chunks: Chunks,
        journal: Journal,
        double_check: float,
        progress: Progress,
    ) -> None:
        self.num_finished = 0
        self._engine = engine
        self._spec = spec
        self._reader = make_reader(engine, spec, chunks.found.repeated)
        self._folder = folder
        self._chunks = chunks
        self._journal = journal
        self._progress = progress
        numbers = range(len(chunks.marks))
        sha256 = spec.prompts.sha256
        self._to_check = [chunk for chunk in numbers if double_check and is_to_check(chunk, double_check, sha256)]
        self._held: dict[tuple[int, bool], _Held] = {}  # by chunk, and whether it is a check
        self._own: set[int] = set()
        self._by_others: set[int] = set()  # chunks whose lines of output are counted on the bar though others wrote them
        self._first = 0  # chunks before have claims
        self._open: dict[int, list[int]] = {}  # lines of input in flight: lines of output to come, samples
        self._num_open = 0  # samples in flight
        self._looked = self._synced = folder.clock.now()
        self._view = folder.look()
        self._count_others()

    def is_over(self) -> bool:
        """Whether all chunks are done, and checked if they are to be."""
        self._look()
        return len(self._view.done) == len(self._chunks.marks) and self._view.checked.issuperset(self._to_check)

    def lines(self) -> Iterator[Asked | None]:
        """Lines of one chunk after the other; None while there is nothing to do."""
        while not self.is_over():
            held = self._next_chunk()
            if held is None:
                self._finish(at_once=True)
                if not self._num_open:
                    self._folder.clock.sleep(WAIT_S)
                    self._look(at_once=True)
                yield None
                continue
            for number, raw in self._read(held):
                if number in held.missing:  # others may have written it meanwhile
                    asked = self._reader.asked(number, raw)
                    num_samples = sum(request.sampling.n for request in asked.requests)
                    self._open[number] = [self._chunks.found.counts[number], num_samples]
                    self._num_open += num_samples
                    yield asked
                self._look()

    def keep(self, number: int, output: Output) -> None:
        """Takes a line of output."""
        entry = self._open[number]
        entry[0] -= 1
        if not entry[0]:
            self._num_open -= entry[1]
            del self._open[number]
        chunk = number // self._chunks.size
        check = self._held.get((chunk, True))
        self._journal.add(number, output, again=check is not None)
        held = check or self._held.get((chunk, False))
        if held is not None:  # else others have finished the chunk meanwhile
            self._arrived(held, number, output.index, self._folder.worker)
        self._journal.flush()
        self._finish()

    def _next_chunk(self) -> _Held | None:
        """Claims a chunk; None if there is none to take now."""
        worker = self._folder.worker
        num_chunks = len(self._chunks.marks)
        tries = 0
        while True:
            self._skip_claimed()
            take = choose(self._view, worker, num_chunks, first=self._first, to_check=self._to_check, own=self._own)
            if take is None and self._num_open < self._engine.num_places:
                take = choose_to_help(self._view, worker)
            if take is None or not self._open.keys().isdisjoint(self._chunks.numbers(take.chunk)):
                return None  # or it is still in flight here
            if self._folder.claim(take.chunk, take.attempt, self._journal.end, check=take.check):
                break
            if take.attempt or take.check:
                tries += 1
                if tries == MOST_TRIES:
                    return None
                self._look(at_once=True)
            else:
                self._first = take.chunk + 1  # another worker was first
        missing = {n: set(range(self._chunks.found.counts[n])) for n in self._chunks.numbers(take.chunk)}
        held = _Held(take, {number: indices for number, indices in missing.items() if indices}, set())
        self._held[take.chunk, take.check] = held
        if not take.check:
            self._read_others(held)
        self._finish()
        return held

    def _skip_claimed(self) -> None:
        while self._first < len(self._chunks.marks) and (
            self._first in self._view.done or self._first in self._view.claims or (self._first, False) in self._held
        ):
            self._first += 1

    def _read(self, held: _Held) -> list[tuple[int, bytes]]:
        """Numbers and bytes of the chunk's lines, the last first if others do it, too."""
        numbers = self._chunks.numbers(held.take.chunk)
        lines = []
        for number, _, raw in self._spec.prompts.lines(self._chunks.marks[held.take.chunk]):
            if number >= numbers.stop:
                break
            lines.append((number, raw))
        return lines[::-1] if held.take.others else lines

    def _arrived(self, held: _Held, number: int, index: int, author: str) -> None:
        """A line of output of a chunk is in a journal."""
        if index in (indices := held.missing.get(number, set())):
            held.authors.add(author)
            indices.discard(index)
            if not indices:
                del held.missing[number]

    def _finish(self, *, at_once: bool = False) -> None:
        """Says of chunks that they are done, once their lines are on disk: once a second, or `at_once`."""
        now = self._folder.clock.now()
        finished = {key: held for key, held in self._held.items() if not held.missing}
        if not finished or (now - self._synced < SYNC_S and not at_once):
            return
        self._journal.sync()
        self._synced = now
        for (chunk, check), held in finished.items():
            self._folder.finish(chunk, sorted(held.authors), check=check)
            (self._view.checked if check else self._view.done).add(chunk)
            (self._view.checks if check else self._view.claims).pop(chunk, None)
            self._own.add(chunk)
            self.num_finished += 1
            del self._held[chunk, check]
        self._count_others()

    def _look(self, *, at_once: bool = False) -> None:
        """Looks at the folder if the last look was a while ago, and reads what others wrote of this worker's chunks."""
        now = self._folder.clock.now()
        if now - self._looked < LOOK_S and not at_once:
            return
        self._looked = now
        self._view = self._folder.look()
        for (chunk, check), held in list(self._held.items()):
            if check:
                continue
            if chunk in self._view.done:
                held.missing.clear()  # another worker wrote the last of it
                del self._held[chunk, check]
            else:
                claims = self._view.claims.get(chunk, ())
                others = tuple(claim for claim in claims if claim.worker not in ("", self._folder.worker))
                held.take = dataclasses.replace(held.take, others=others)
                self._read_others(held)
        self._finish()
        self._count_others()

    def _read_others(self, held: _Held) -> None:
        """Takes note of the chunk's lines of output that are in journals of other workers."""
        for claim in held.take.others:
            path = self._folder.file("journal", claim.worker)
            if not claim.worker or not path.exists():
                continue
            start = held.tails.get(claim.worker, claim.start)
            for raw in sound_lines(path, start):
                start += len(raw)
                found = line_of(raw)
                if found is not None and found[0] // self._chunks.size == held.take.chunk:
                    self._arrived(held, found[0], found[1].index, claim.worker)
            held.tails[claim.worker] = start

    def _count_others(self) -> None:
        """Counts on the bar what others wrote of chunks that are done."""
        for chunk in self._view.done - self._by_others:
            self._by_others.add(chunk)
            written = sum(
                self._journal.has(number) * self._chunks.found.counts[number] for number in self._chunks.numbers(chunk)
            )
            self._progress.finished(self._chunks.num_outputs(chunk) - written)
