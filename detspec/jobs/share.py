"""The part of a job that falls to one worker, in one pass of its engine.

1. The worker claims a chunk when too few of its requests are in flight, so its engine stays full from chunk to chunk.
2. Each completion goes into the worker's own journal. A chunk is done when all its lines are in journals.
3. A chunk whose workers were killed or frozen is taken again, without the lines that their journals hold.
4. At the end idle workers help with what others have not finished, from its last line backwards.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from detspec.engine.engine import Engine
from detspec.jobs.chunk_folder import ChunkFolder, ChunkTask, Claim
from detspec.jobs.chunks import ChunkedLines, choose, choose_to_help, is_to_check, left_to
from detspec.jobs.journal import Journal, line_of, sound_lines
from detspec.jobs.lines import CheckedLine, Output
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import make_reader
from detspec.progress import Progress

LOOK_S = 2.0  # between two looks at the folder
WAIT_S = 0.5  # until the next look when there is nothing to do
SYNC_S = 1.0  # until chunks that are finished are on disk, and said to be done
MOST_TRIES = 3  # claims that others made first, until the next look


@dataclasses.dataclass(eq=False)
class _Held:
    """A task that this worker has claimed.

    Attributes:
        task: the chunk, and whether it is to be checked.
        others: claims of other workers, whose lines need not be done again.
        missing: lines of output that are in no journal yet: indices by line of input.
        authors: workers whose journals hold the others.
        tails: how far journals of other workers were read.
    """

    task: ChunkTask
    others: tuple[Claim, ...]
    missing: dict[int, set[int]]
    authors: set[str] = dataclasses.field(default_factory=set)
    tails: dict[str, int] = dataclasses.field(default_factory=dict)

    def arrived(self, number: int, index: int, author: str) -> None:
        """Takes note of a line of output in the journal of `author`."""
        if index in (indices := self.missing.get(number, set())):
            self.authors.add(author)
            indices.discard(index)
            if not indices:
                del self.missing[number]


class Share:
    """The part of a job that falls to one worker.

    Attributes:
        reader: the format of the lines.
        num_finished: tasks that it finished.
    """

    def __init__(
        self,
        engine: Engine,
        spec: JobSpec,
        folder: ChunkFolder,
        chunks: ChunkedLines,
        journal: Journal,
        double_check: float,
        progress: Progress,
    ) -> None:
        self.reader = make_reader(engine, spec, chunks.found.repeated)
        self.num_finished = 0
        self._engine = engine
        self._prompts = spec.prompts
        self._folder = folder
        self._chunks = chunks
        self._journal = journal
        self._progress = progress
        numbers = range(len(chunks.marks))
        sha256 = spec.prompts.sha256
        self._to_check = [chunk for chunk in numbers if double_check and is_to_check(chunk, double_check, sha256)]
        self._all = {*map(ChunkTask, numbers), *(ChunkTask(chunk, is_check=True) for chunk in self._to_check)}
        self._held: dict[ChunkTask, _Held] = {}
        self._counted: set[ChunkTask] = set()  # tasks that are counted on the bar
        self._first = 0  # chunks before have claims
        self._open: dict[int, list[int]] = {}  # lines of input in flight: lines of output to come, samples
        self._looked = self._synced = folder.clock.now()
        self._view = folder.look()
        progress.count(0, chunks.found.num_completions)
        self._count_done()

    def is_over(self) -> bool:
        """Whether all chunks are done, and checked if they are to be."""
        self._look()
        return self._view.done.issuperset(self._all)

    def lines(self) -> Iterator[CheckedLine | None]:
        """Yields the lines of one chunk after the other; None while there is nothing to do."""
        while not self.is_over():
            held = self._claim_next()
            if held is None:
                self._finish(at_once=True)
                if not self._open:
                    self._progress.waits(left_to(self._view, self._all, self._folder.worker))
                    self._folder.clock.sleep(WAIT_S)
                    self._look(at_once=True)
                yield None
                continue
            for number, raw in self._read(held.task.chunk, backwards=bool(held.others)):
                if number in held.missing:  # others may have written it meanwhile
                    asked = self.reader.asked(number, raw)
                    self._open[number] = [asked.num_outputs, sum(request.sampling.n for request in asked.requests)]
                    yield asked
                self._look()

    def keep(self, number: int, output: Output) -> None:
        """Takes a line of output."""
        self._open[number][0] -= 1
        if not self._open[number][0]:
            del self._open[number]
        chunk = number // self._chunks.size
        check = self._held.get(ChunkTask(chunk, is_check=True))
        self._journal.add(number, output, again=check is not None)
        held = check or self._held.get(ChunkTask(chunk))
        if held is not None:  # else others have finished the chunk meanwhile
            held.arrived(number, output.index, self._folder.worker)
        self._journal.flush()
        self._finish()

    def _claim_next(self) -> _Held | None:
        """Claims a task; None if there is none to take now."""
        worker = self._folder.worker
        num_chunks = len(self._chunks.marks)
        tries = 0
        while True:
            self._skip_claimed()
            authors = self._folder.authors
            task = choose(self._view, worker, num_chunks, first=self._first, to_check=self._to_check, authors=authors)
            if task is None and sum(samples for _, samples in self._open.values()) < self._engine.num_places:
                task = choose_to_help(self._view, worker)
            if task is None or not self._open.keys().isdisjoint(self._chunks.numbers(task.chunk)):
                return None  # or it is still in flight here
            claims = self._view.claims.get(task, ())
            if self._folder.claim(task, len(claims), self._journal.end):
                break
            if claims or task.is_check:
                tries += 1
                if tries == MOST_TRIES:
                    return None
                self._look(at_once=True)
            else:
                self._first = task.chunk + 1  # another worker was first
        counts = self._chunks.found.counts
        missing = {number: set(range(counts[number])) for number in self._chunks.numbers(task.chunk) if counts[number]}
        held = _Held(task, () if task.is_check else claims, missing)
        self._held[task] = held
        self._view.claims[task] = (*claims, Claim(worker, self._journal.end, is_live=True))  # else it would be chosen again
        self._read_others(held)
        self._finish()
        return held

    def _skip_claimed(self) -> None:
        while (task := ChunkTask(self._first)) in self._view.done or task in self._view.claims or task in self._held:
            self._first += 1

    def _read(self, chunk: int, *, backwards: bool) -> list[tuple[int, bytes]]:
        """Numbers and bytes of the chunk's lines, in their order or, to meet others that do it, `backwards`."""
        numbers = self._chunks.numbers(chunk)
        marked = itertools.islice(self._prompts.lines(self._chunks.marks[chunk]), len(numbers))
        lines = [(mark.number, raw) for mark, raw in marked]
        return lines[::-1] if backwards else lines

    def _finish(self, *, at_once: bool = False) -> None:
        """Says of tasks that they are done, once their lines are on disk: once a second, or `at_once`."""
        now = self._folder.clock.now()
        finished = {task: held for task, held in self._held.items() if not held.missing}
        if not finished or (now - self._synced < SYNC_S and not at_once):
            return
        self._journal.sync()
        self._synced = now
        for task, held in finished.items():
            self._folder.finish(task, sorted(held.authors))
            self._view.done.add(task)
            self._view.claims.pop(task, None)
            self.num_finished += 1
            del self._held[task]
        self._count_done()

    def _look(self, *, at_once: bool = False) -> None:
        """Looks at the folder if the last look was a while ago, and reads what others wrote of this worker's chunks."""
        now = self._folder.clock.now()
        if now - self._looked < LOOK_S and not at_once:
            return
        self._looked = now
        self._view = self._folder.look()
        for task, held in list(self._held.items()):
            if task.is_check:
                continue
            if task in self._view.done:
                held.missing.clear()  # another worker wrote the last of it
                del self._held[task]
            else:
                claims = self._view.claims.get(task, ())
                held.others = tuple(claim for claim in claims if claim.worker not in ("", self._folder.worker))
                self._read_others(held)
        self._finish()
        self._count_done()

    def _read_others(self, held: _Held) -> None:
        """Takes note of the task's lines of output that are in journals of other workers."""
        for claim in held.others:
            path = self._folder.file("journal", claim.worker)
            if not claim.worker or not path.exists():
                continue
            start = held.tails.get(claim.worker, claim.start)
            for raw in sound_lines(path, start, is_written=True):
                start += len(raw)
                found = line_of(raw)
                if found is not None and found[0] // self._chunks.size == held.task.chunk:
                    held.arrived(found[0], found[1].index, claim.worker)
            held.tails[claim.worker] = start

    def _count_done(self) -> None:
        """Counts the lines of output of chunks that are done, by this worker or by others."""
        for task in self._view.done - self._counted:
            self._counted.add(task)
            self._progress.finished(0 if task.is_check else self._chunks.num_outputs(task.chunk))
