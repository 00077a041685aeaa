"""The part of a job that falls to one worker, in one pass of its engine.

1. The worker claims a chunk when too few of its requests are in flight, so its engine stays full from chunk to chunk.
2. Each completion goes into the worker's own journal. A chunk is done when all its lines are in journals.
3. A chunk whose workers were killed or frozen is taken again, without the lines that their journals hold.
4. At the end idle workers help with what others have not finished, from its last line backwards.
"""

import dataclasses
from collections.abc import Iterator

from detspec.engine.engine_group import AnyEngine
from detspec.jobs.chunk_choice import Take, choose, choose_to_help, is_to_check
from detspec.jobs.chunk_folder import ChunkFolder
from detspec.jobs.journal import Journal, line_of, sound_lines
from detspec.jobs.lines import Asked, Output
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import make_reader
from detspec.jobs.stored_scan import Chunks
from detspec.progress import Progress

LOOK_S = 2.0  # between two looks at the folder
WAIT_S = 0.5  # until the next look when there is nothing to do
SYNC_S = 1.0  # until chunks that are finished are on disk, and said to be done
MOST_TRIES = 3  # claims that others made first, until the next look


@dataclasses.dataclass(eq=False)
class _Held:
    """A chunk that this worker does: lines of output that are still missing, and who wrote the others."""

    take: Take
    missing: dict[int, set[int]]  # by line of input: indices
    authors: set[str]
    tails: dict[str, int] = dataclasses.field(default_factory=dict)  # how far journals of others were read


class Share:
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
        self.reader = make_reader(engine, spec, chunks.found.repeated)
        self._folder = folder
        self._chunks = chunks
        self._journal = journal
        self._progress = progress
        numbers = range(len(chunks.marks))
        sha256 = spec.prompts.sha256
        self._to_check = [chunk for chunk in numbers if double_check and is_to_check(chunk, double_check, sha256)]
        self._held: dict[tuple[int, bool], _Held] = {}  # by chunk, and whether it is a check
        self._authors: dict[int, list[str]] = {}  # who did a chunk that is to be checked
        self._counted: dict[int, set[tuple[int, int]]] = {}  # by chunk that is not done: lines of output that are counted
        self._counted_whole: set[int] = set()  # chunks of which all lines of output are counted
        self._first = 0  # chunks before have claims
        self._open: dict[int, list[int]] = {}  # lines of input in flight: lines of output to come, samples
        self._num_open = 0  # samples in flight
        self._looked = self._synced = folder.clock.now()
        self._view = folder.look()
        progress.count(0, chunks.found.num_completions)
        self._count_done()

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
                    asked = self.reader.asked(number, raw)
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
        self._count(number, output.index)
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
            take = choose(self._view, worker, num_chunks, first=self._first, to_check=self._to_check, authors=self._who_did)
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

    def _who_did(self, chunk: int) -> list[str]:
        """The authors of a chunk that is done."""
        if not self._authors.get(chunk):
            self._authors[chunk] = self._folder.authors(chunk)
        return self._authors[chunk]

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
        self._count(number, index)
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
            self.num_finished += 1
            del self._held[chunk, check]
        self._count_done()

    def _look(self, *, at_once: bool = False) -> None:
        """Looks at the folder if the last look was a while ago, and reads what others wrote of this worker's chunks."""
        now = self._folder.clock.now()
        if now - self._looked < LOOK_S and not at_once:
            return
        self._looked = now
        self._view = self._folder.look()
        self._authors = {chunk: who for chunk, who in self._authors.items() if chunk in self._view.done}
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
        self._count_done()

    def _read_others(self, held: _Held) -> None:
        """Takes note of the chunk's lines of output that are in journals of other workers."""
        for claim in held.take.others:
            path = self._folder.file("journal", claim.worker)
            if not claim.worker or not path.exists():
                continue
            start = held.tails.get(claim.worker, claim.start)
            for raw in sound_lines(path, start, is_written=True):
                start += len(raw)
                found = line_of(raw)
                if found is not None and found[0] // self._chunks.size == held.take.chunk:
                    self._arrived(held, found[0], found[1].index, claim.worker)
            held.tails[claim.worker] = start

    def _count(self, number: int, index: int) -> None:
        """Counts a line of output, unless it is counted: it may be done twice, by this worker and by others."""
        chunk = number // self._chunks.size
        if chunk not in self._counted_whole and (number, index) not in (counted := self._counted.setdefault(chunk, set())):
            counted.add((number, index))
            self._progress.finished()

    def _count_done(self) -> None:
        """Counts the other lines of output of chunks that are done."""
        for chunk in self._view.done - self._counted_whole:
            self._counted_whole.add(chunk)
            self._progress.finished(self._chunks.num_outputs(chunk) - len(self._counted.pop(chunk, ())))
