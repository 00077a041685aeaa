"""Who is in which row: admission, pages for the next segment, preemption, abort; host bookkeeping alone.

A request that has waited longest comes first. When pages run out, the youngest row gives its own back and waits again, at the
front, with the tokens it has: it is caught up with later, to the same bits. The oldest row is never preempted, so all end.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator

from detspec.engine.allocator import Allocator
from detspec.engine.policy import Load
from detspec.engine.request import Request, Stats
from detspec.engine.sequence import SequenceState, first_sample


@dataclasses.dataclass(frozen=True)
class Admitted:
    """Samples that got a row, and for each which page to copy over which."""

    samples: tuple[SequenceState, ...]
    copies: tuple[tuple[int, int], ...]


class Scheduler:
    """Rows, their samples in the order in which they came, and the queue before them."""

    def __init__(self, allocator: Allocator, *, max_requests: int, window: int, chunk: int | None) -> None:
        """Nobody is there; `chunk` is `C` of a model that thinks."""
        self.allocator = allocator
        self.samples: list[SequenceState] = []  # in rows, the oldest first
        self.num_preemptions = 0
        self._queue: deque[SequenceState] = deque()
        self._source: Iterator[SequenceState] = iter(())
        self._aborted: set[str] = set()
        self._free_rows = list(range(max_requests))
        self._max_rows = max_requests
        self._window, self._chunk = window, chunk

    @property
    def waiting(self) -> bool:
        """Whether someone waits for a row."""
        return self._peek(0)

    def feed(self, requests: Iterator[Request]) -> None:
        """The requests to come; they are asked for as rows get free, and at most a round of rows ahead."""
        self._source = (first_sample(one) for request in requests for one in request.samples())
        self._aborted.clear()

    def look_ahead(self) -> None:
        """Asks for requests of one more round of rows, so that they are at hand when rows get free."""
        self._peek(self._max_rows - 1)

    def admit(self, context: bytes) -> Admitted:
        """Gives rows and pages to those who wait, as far as there are any.

        Whoever begins like a row that is just being prefilled waits until it can share that row's pages; others pass.
        """
        admitted: list[SequenceState] = []
        copies: list[tuple[int, int]] = []
        place = 0  # in the queue; those before it are to wait a little
        while self._free_rows and place < self._max_rows and self._peek(place):
            sample = self._queue[place]
            if self.allocator.awaits(sample, context):
                place += 1
                continue
            copy = self.allocator.admit(
                *(sample, self._free_rows[-1], context),
                num_positions=self._reach(sample, self._window),
                headroom=len(self.samples),
            )
            if copy is None:
                break
            # An ordinary row's new tokens come from the fast path; what it has to catch up with does not.
            sample.canonical = sample.limit if sample.request.sampling.deterministic else sample.committed - 1
            del self._queue[place]
            self._free_rows.pop()
            self.samples.append(sample)
            admitted.append(sample)
            copies.append(copy)
        return Admitted(tuple(admitted), tuple(copies))

    def load(self) -> Load:
        """What is in the rows."""
        deterministic = [sample for sample in self.samples if sample.request.sampling.deterministic]
        behind = tuple(sample.behind for sample in self.samples if sample.behind)
        return Load(
            num_deterministic=len(deterministic),
            num_ordinary=len(self.samples) - len(deterministic),
            behind=behind,
            ready_deterministic=sum(not sample.behind for sample in deterministic),
            num_ready=len(self.samples) - len(behind),
            unread_chunks=sum(map(self._unread_chunks, self.samples)),
            waiting=self.waiting,
        )

    def affordable(self, steps: int, window: int) -> int:
        """How many steps, at most `steps`, the pages last for, if each may commit `window` tokens a row; 0 if not for one."""
        while steps and self._missing(steps * window) > self.allocator.pool.num_available:
            steps //= 2
        return steps

    def reserve(self, gain: int) -> None:
        """Gives every row the pages for `gain` more tokens."""
        for sample in self.samples:
            self.allocator.grow(sample, self._reach(sample, gain))

    def preempt(self, context: bytes) -> None:
        """Sends the youngest back to the front of the queue; the host must have read its tokens."""
        sample = self.samples[-1]
        self.remove(sample, context, keep=True)
        sample.earlier, sample.stay = sample.stats, Stats()
        self._queue.appendleft(sample)
        self.num_preemptions += 1

    def remove(self, sample: SequenceState, context: bytes, *, keep: bool) -> None:
        """Frees the row and the pages of `sample`, whose contents stay known with `keep`."""
        assert sample.row is not None
        self.samples.remove(sample)
        self._free_rows.append(sample.row)
        self.allocator.free(sample, context, keep=keep)

    def abort(self, id: str, context: bytes) -> list[SequenceState]:
        """Takes out all samples of request `id`, from rows and queue; those not yet asked for never come."""
        self._aborted.add(id)
        in_rows = [sample for sample in self.samples if sample.request.id == id]
        for sample in in_rows:
            self.remove(sample, context, keep=False)
        queued = [sample for sample in self._queue if sample.request.id == id]
        for sample in queued:
            self._queue.remove(sample)
        return in_rows + queued

    def clear(self, context: bytes) -> None:
        """Takes everybody out."""
        for sample in list(self.samples):
            self.remove(sample, context, keep=False)
        self._queue.clear()
        self._source = iter(())

    def _missing(self, gain: int) -> int:
        return sum(self.allocator.num_missing(sample, self._reach(sample, gain)) for sample in self.samples)

    def _unread_chunks(self, sample: SequenceState) -> int:
        """Chunks of its prompt that `sample` has yet to read and to think about."""
        if not sample.thinks or self._chunk is None:
            return 0
        return max(0, (sample.prompt_len - 1) // self._chunk - sample.length // self._chunk)

    @staticmethod
    def _reach(sample: SequenceState, gain: int) -> int:
        """Positions that `sample` may touch while it gains up to `gain` tokens."""
        return min(sample.limit, sample.committed + gain)

    def _peek(self, place: int) -> bool:
        """Whether there is someone at `place` of the queue, for whom the source is asked if need be."""
        while len(self._queue) <= place:
            sample = next(self._source, None)
            if sample is None:
                return False
            if sample.request.id not in self._aborted:
                self._queue.append(sample)
        return True
