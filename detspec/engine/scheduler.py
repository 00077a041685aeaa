"""Which sequence is in which place: admission, pages for the next segment, preemption; host bookkeeping alone.

The request that has waited longest comes first. When pages run out, the youngest sequence gives its own back and waits again,
at the front, with the tokens it has: it is caught up with later, to the same bits. The oldest is never preempted, so all end.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from detspec.engine.allocator import Allocator
from detspec.engine.policy import NEVER, Load
from detspec.engine.sequence import SequenceState

AloneFn = Callable[[SequenceState], contextlib.AbstractContextManager[object]]


class Admitted(NamedTuple):
    """A sequence that got a place, and which page to copy over which before it runs."""

    sequence: SequenceState
    copy: tuple[int, int]


class Scheduler:
    """The sequences in places of the device, the oldest first, and the queue before them."""

    def __init__(
        self, allocator: Allocator, queue: deque[SequenceState], *, max_requests: int, window: int, chunk: int | None
    ) -> None:
        """Schedulers of several devices may share one `queue`.

        `window` is the longest window of a prefill pass; `chunk` is `C` of a model that thinks, else None.
        """
        self.allocator = allocator
        self.sequences: list[SequenceState] = []
        self.queue = queue
        self.num_preemptions = 0
        self._free_places = list(range(max_requests))
        self._window = window
        self._chunk = chunk

    @property
    def all(self) -> list[SequenceState]:
        """All sequences that have not ended, in places or waiting."""
        return [*self.sequences, *self.queue]

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return bool(self._free_places)

    def admit(
        self, alone: AloneFn = contextlib.nullcontext, *, most: int = NEVER, others: Sequence["Scheduler"] = ()
    ) -> list[Admitted]:
        """Gives places and pages to sequences that wait, as far as there are any, until it has `most` sequences.

        A sequence that begins like one that is just being prefilled waits until it can share its pages. So does one of which
        `others` hold more pages, as long as they have room. Sequences behind them pass. What raises for a sequence does so
        inside `alone(sequence)`, which passes it on or takes the sequence out.
        """
        admitted: list[Admitted] = []
        others = [other for other in others if other.has_room and len(other.sequences) < most]
        index = 0  # in the queue; those before it are to wait a little
        while self._free_places and len(self.sequences) < most and index < min(len(self.queue), len(self.allocator.page_table)):
            sequence = self.queue[index]
            waits: list[bool] = []
            with alone(sequence):
                shared = self.allocator.num_shared(sequence) if others else 0
                is_elsewhere = any(other.allocator.num_shared(sequence) > shared for other in others)
                waits.append(is_elsewhere or self.allocator.awaits(sequence))
            if waits != [False]:
                index += len(waits)  # where that raised, the sequence has left the queue
                continue
            copy = self.allocator.admit(
                sequence, self._free_places[-1], num_positions=self._reach(sequence, self._window), headroom=len(self.sequences)
            )
            if copy is None:
                break
            # An ordinary sequence's new tokens come from the fast path; what it has to catch up with does not.
            is_canonical = sequence.is_given or sequence.request.sampling.deterministic
            sequence.canonical = sequence.limit if is_canonical else sequence.committed - 1
            del self.queue[index]
            self._free_places.pop()
            self.sequences.append(sequence)
            admitted.append(Admitted(sequence, copy))
        return admitted

    def load(self) -> Load:
        """What is in the places to be generated."""
        deterministic = [sequence for sequence in self.sequences if sequence.request.sampling.deterministic]
        behind = tuple(sequence.behind for sequence in self.sequences if sequence.behind)
        return Load(
            num_deterministic=len(deterministic),
            num_ordinary=len(self.sequences) - len(deterministic),
            behind=behind,
            ready_deterministic=sum(not sequence.behind for sequence in deterministic),
            num_ready=len(self.sequences) - len(behind),
            unread_chunks=sum(map(self._unread_chunks, self.sequences)),
            waiting=bool(self.queue),
            processing=any(sequence.request.sampling.needs_processing for sequence in self.sequences),
        )

    def affords(self, gain: int) -> bool:
        """Whether the pages last for `gain` more tokens of every sequence."""
        return self._missing(gain) <= self.allocator.pool.num_available

    def affordable(self, steps: int, most_tokens: int) -> int:
        """How many steps, at most `steps`, the pages last for, if each may commit `most_tokens`; 0 if not for one."""
        while steps and not self.affords(steps * most_tokens):
            steps //= 2
        return steps

    def reserve(self, gain: int) -> None:
        """Gives every sequence the pages for `gain` more tokens."""
        for sequence in self.sequences:
            self.allocator.grow(sequence, self._reach(sequence, gain))

    def preempt(self) -> None:
        """Sends the youngest back to the front of the queue; the host must have fetched its tokens."""
        sequence = self.sequences[-1]
        self.remove(sequence, keep=True)
        sequence.preempt()
        self.queue.appendleft(sequence)
        self.num_preemptions += 1

    def remove(self, sequence: SequenceState, *, keep: bool) -> None:
        """Frees the place and the pages of `sequence`, or its place in the queue; with `keep` its pages stay cached."""
        if sequence.place is None:
            self.queue.remove(sequence)
            return
        place = sequence.place
        self.allocator.free(sequence, keep=keep)
        self.sequences.remove(sequence)
        self._free_places.append(place)

    def take_out(self, is_meant: Callable[[SequenceState], bool]) -> list[SequenceState]:
        """Removes all sequences that `is_meant` accepts, and returns them."""
        found = [sequence for sequence in self.all if is_meant(sequence)]
        for sequence in found:
            self.remove(sequence, keep=False)
        return found

    def _missing(self, gain: int) -> int:
        return sum(self.allocator.num_missing(sequence, self._reach(sequence, gain)) for sequence in self.sequences)

    def _unread_chunks(self, sequence: SequenceState) -> int:
        """Chunks of its prompt that `sequence` has yet to read and to think about."""
        if not sequence.thinks or self._chunk is None:
            return 0
        return max(0, (sequence.prompt_len - 1) // self._chunk - sequence.length // self._chunk)

    @staticmethod
    def _reach(sequence: SequenceState, gain: int) -> int:
        """Positions that `sequence` may touch while it gains up to `gain` tokens; given ones are read at once."""
        return sequence.limit if sequence.is_given else min(sequence.limit, sequence.committed + gain)
