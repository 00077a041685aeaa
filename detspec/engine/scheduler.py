"""Places and pages of one device: admission, pages on demand, preemption; host bookkeeping alone.

The request that has waited longest comes first. When pages run out, the youngest sequence gives its own back and waits again,
at the front, with the tokens it has: it is caught up with later, to the same bits. The oldest is never preempted, so all end.

Pages are shared where two sequences begin with the same tokens. A sequence of 150 prompt tokens with pages of 64 has two whole
pages, and 21 of the 22 tokens left in a partial one (the last token of all is the first decoding step's):

    keys    [0 64) [64 128) [128 149)      another sample of this prompt holds the first two pages too, and copies the third

Keys begin with what a rider says that keys and values depend on. Where it gives no key, nothing is shared.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.decide import Load
from detspec.engine.pages import PagePool, partial_key, prefix_keys
from detspec.engine.sequence import SequenceState
from detspec.generation.loop import NEVER

AloneFn = Callable[[SequenceState], contextlib.AbstractContextManager[object]]


class Admitted(NamedTuple):
    """A sequence that got a place, and which page to copy over which before it runs."""

    sequence: SequenceState
    copy: tuple[int, int]


class Scheduler:
    """The places of one device and its pages.

    Attributes:
        sequences: sequences in places, the oldest first.
        queue: sequences that wait, the next one first.
        pool: which pages are free.
        page_table: int32 `[max_requests, max_pages]`, the pages of each place.
        num_preemptions: how often a sequence gave its pages back.
    """

    def __init__(
        self,
        pool: PagePool,
        queue: deque[SequenceState],
        *,
        page: int,
        shape: tuple[int, int],
        sharing: bool = True,
        window: int,
        passes_fn: Callable[[int, int], int] | None = None,
    ) -> None:
        """Schedulers of several devices may share one `queue`.

        `page` is the positions of a page, `shape` that of the page table, `window` the longest window of a prefill pass.
        `passes_fn` says how many passes a rider takes at most to read a prompt of so many tokens, so many of which it has read;
        None if none reads. Without `sharing` no two sequences share pages.
        """
        self.sequences: list[SequenceState] = []
        self.queue = queue
        self.pool = pool
        self.page_table = np.full(shape, SCRATCH_PAGE, np.int32)
        self.num_preemptions = 0
        self._free_places = list(range(shape[0]))
        self._filling: dict[bytes, SequenceState] = {}  # keys of pages that a sequence is about to fill
        self._page = page
        self._sharing = sharing
        self._window = window
        self._passes_fn = passes_fn

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
        while self._free_places and len(self.sequences) < most and index < min(len(self.queue), len(self.page_table)):
            sequence = self.queue[index]
            waits: list[bool] = []
            with alone(sequence):
                shared = self.num_shared(sequence) if others else 0
                waits.append(any(other.num_shared(sequence) > shared for other in others) or self._awaits(sequence))
            if waits != [False]:
                index += len(waits)  # if that raised, the sequence has left the queue
                continue
            copy = self._place(sequence)
            if copy is None:
                break
            del self.queue[index]
            admitted.append(Admitted(sequence, copy))
        return admitted

    def num_shared(self, sequence: SequenceState) -> int:
        """Pages that hold the beginning of `sequence` already."""
        is_there = [self.pool.find(key) is not None for key in self._keys(sequence)]
        return [*is_there, False].index(False)

    def load(self) -> Load:
        """Counts what is in the places to be generated."""
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
            processing=any(sequence.request.needs_processing for sequence in self.sequences),
            is_streamed=any(sequence.streamed for sequence in self.sequences),
            stops=any(sequence.request.sampling.stop for sequence in self.sequences),
        )

    def affords(self, gain: int) -> bool:
        """Whether the pages last for `gain` more tokens of every sequence."""
        missing = sum(self._num_missing(sequence, _reach(sequence, gain)) for sequence in self.sequences)
        return missing <= self.pool.num_available

    def affordable(self, steps: int, most_tokens: int) -> int:
        """Number of steps, at most `steps`, that the pages last for, if each may commit `most_tokens`; 0 if not for one."""
        while steps and not self.affords(steps * most_tokens):
            steps //= 2
        return steps

    def reserve(self, gain: int) -> None:
        """Gives every sequence the pages for `gain` more tokens; they must be available."""
        for sequence in self.sequences:
            if missing := self._num_missing(sequence, _reach(sequence, gain)):
                sequence.pages.extend(self.pool.allocate() for _ in range(missing))
                self._write(sequence)

    def register(self, sequence: SequenceState) -> None:
        """Lets other sequences share what the canonical pass has written of the prompt."""
        while sequence.registered < len(sequence.keys):
            key, num_positions = sequence.keys[sequence.registered]
            if sequence.length < num_positions:
                return
            self.pool.register(key, sequence.pages[sequence.registered])
            self._stop_filling(sequence, key)
            sequence.registered += 1

    def preempt(self) -> None:
        """Sends the youngest back to the front of the queue; the host must have fetched its tokens."""
        sequence = self.sequences[-1]
        self.remove(sequence, keep=True)
        sequence.preempt()
        self.queue.appendleft(sequence)
        self.num_preemptions += 1

    def remove(self, sequence: SequenceState, *, keep: bool) -> None:
        """Frees the place and the pages of `sequence`, or its place in the queue.

        With `keep`, whole pages that the canonical pass wrote stay in the prefix cache.
        """
        if sequence.place is None:
            self.queue.remove(sequence)
            return
        if keep and self._shares(sequence):
            known = min(sequence.canonical, sequence.length, len(sequence.tokens))
            keys = prefix_keys(self._root(sequence), sequence.tokens[:known], self._page)
            for key, page in zip(keys, sequence.pages, strict=False):
                self.pool.register(key, page)
        for key, _ in sequence.keys:
            self._stop_filling(sequence, key)
        self.pool.release(sequence.pages)
        self.page_table[sequence.place] = SCRATCH_PAGE
        self._free_places.append(sequence.place)
        self.sequences.remove(sequence)
        sequence.leave()

    def take_out(self, is_meant: Callable[[SequenceState], bool]) -> None:
        """Removes all sequences that `is_meant` accepts."""
        for sequence in filter(is_meant, self.all):
            self.remove(sequence, keep=False)

    def _shares(self, sequence: SequenceState) -> bool:
        return self._sharing and sequence.shares

    def _awaits(self, sequence: SequenceState) -> bool:
        """Whether another sequence is just filling a page that `sequence` could share if it came a little later."""
        missing = next((key for key in self._keys(sequence) if self.pool.find(key) is None), None)
        return missing in self._filling

    def _place(self, sequence: SequenceState) -> tuple[int, int] | None:
        """Gives `sequence` a place and pages for its first passes, shared ones first.

        Returns which page to copy over which before anything else, the scratch page over itself for none; None, with nothing
        changed, if there are too few pages to leave one for each sequence that runs.
        """
        keys = self._keys(sequence)
        whole = (len(sequence.tokens) - 1) // self._page
        shared: list[int] = []
        for key in keys[:whole]:
            page = self.pool.share(key)
            if page is None:
                break
            shared.append(page)
        num_new = max(self._pages_for(_reach(sequence, self._window)) - len(shared), 0)
        if self.pool.num_available < num_new + len(self.sequences):
            self.pool.release(shared)
            return None
        length = len(shared) * self._page
        copy = SCRATCH_PAGE, SCRATCH_PAGE
        source = self.pool.find(keys[whole]) if len(shared) == whole < len(keys) else None
        pages = [*shared, *(self.pool.allocate() for _ in range(num_new))]
        if source is not None:
            # Held or not, the page keeps its contents until after the copy: what overwrites it is started later.
            length = sequence.prompt_len - 1
            copy = source, pages[whole]
        sequence.enter(self._free_places.pop(), pages, length=length)
        self.sequences.append(sequence)
        self._write(sequence)
        for key in keys:
            if self.pool.find(key) is None:
                self._filling.setdefault(key, sequence)
        self.register(sequence)
        return copy

    def _pages_for(self, num_positions: int) -> int:
        """Pages that so many positions take."""
        return -(-num_positions // self._page)

    def _num_missing(self, sequence: SequenceState, num_positions: int) -> int:
        """Pages that `sequence` lacks for `num_positions`."""
        return max(0, self._pages_for(num_positions) - len(sequence.pages))

    def _unread_chunks(self, sequence: SequenceState) -> int:
        """Chunks of the prompt of `sequence` that a rider has yet to read, in a pass each at most."""
        if not sequence.brought.is_read or self._passes_fn is None:
            return 0
        return self._passes_fn(sequence.prompt_len, sequence.length)

    def _keys(self, sequence: SequenceState) -> list[bytes]:
        """Keys of the whole pages; and of the partial one, if there is one and it is the prompt's. None without sharing."""
        if not sequence.keys and self._shares(sequence):
            needed = sequence.tokens[:-1]
            root = self._root(sequence)
            keys = prefix_keys(root, needed, self._page)
            tail = needed[len(keys) * self._page :]
            if tail and len(sequence.tokens) == sequence.prompt_len:
                keys.append(partial_key(keys[-1] if keys else root, tail))
            sequence.keys = [(key, min(len(needed), self._page * number)) for number, key in enumerate(keys, 1)]
        return [key for key, _ in sequence.keys]

    def _root(self, sequence: SequenceState) -> bytes:
        """Root of the keys of its pages: what all keys and values depend on, and what its own depend on."""
        key = sequence.brought.page_key
        return hashlib.sha256(self.pool.root + key).digest() if key else self.pool.root

    def _stop_filling(self, sequence: SequenceState, key: bytes) -> None:
        if self._filling.get(key) is sequence:
            del self._filling[key]

    def _write(self, sequence: SequenceState) -> None:
        self.page_table[sequence.place, : len(sequence.pages)] = sequence.pages


def _reach(sequence: SequenceState, gain: int) -> int:
    """Positions that `sequence` may touch while it gains up to `gain` tokens; given ones are read at once."""
    return sequence.limit if sequence.is_given else min(sequence.limit, sequence.committed + gain)
