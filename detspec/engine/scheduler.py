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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.decide import Load, Segment
from detspec.engine.sequence import SequenceState
from detspec.generation.loop import NEVER

AloneFn = Callable[[SequenceState], contextlib.AbstractContextManager[object]]


class PagePool:
    """Pages 1 .. `num_pages`, shared by what they hold; page 0 is scratch and has no holder.

    1. `allocate` hands out a free page, otherwise it evicts the least recently used cached one.
    2. `register` says what a page holds, under a key from `prefix_keys`; `share` hands it out once more under that key.
    3. `release` gives a page back. A registered page stays cached until it is needed for other contents.

    A page has as many holders as sequences whose page table lists it. Only keys and values of the canonical pass are
    registered, and whole pages of committed tokens are never written again, so holders cannot disturb each other.

    `root` is a digest of all that keys and values depend on besides tokens; it is part of every key.
    """

    def __init__(self, num_pages: int, root: bytes = b"") -> None:
        self.num_pages = num_pages
        self.root = root
        self._free = list(range(num_pages, SCRATCH_PAGE, -1))
        self._holders: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # pages without holders, least recently used first
        self._page_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return len(self._holders)

    def allocate(self) -> int:
        """A page for one new holder; `IndexError` if none is available: ask `num_available` first."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            for key in self._keys_of.pop(page):
                del self._page_of[key]
        else:
            raise IndexError(f"all {self.num_pages} pages are held")
        self._holders[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        """The page registered under `key`, without holding it."""
        return self._page_of.get(key)

    def share(self, key: bytes) -> int | None:
        """The page registered under `key`, for one more holder; None if there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return page

    def register(self, key: bytes, page: int) -> None:
        """Says what `page`, which must have a holder, holds. The first page of a key stays its page."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._keys_of.setdefault(page, []).append(key)

    def release(self, pages: Iterable[int]) -> None:
        """Takes one holder from each of `pages`, given in the order of a sequence: its end is evicted first."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self._keys_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def clear(self, root: bytes | None = None) -> None:
        """Forgets what all pages hold; keys depend on `root` from now on, if it is given."""
        self.root = self.root if root is None else root
        self._page_of.clear()
        self._keys_of.clear()
        self._free.extend(self._kept)
        self._kept.clear()


def prefix_keys(root: bytes, tokens: Sequence[int], page: int) -> list[bytes]:
    """A key for each whole page of `tokens`: digest of `root` and of all tokens up to the page's end."""
    keys: list[bytes] = []
    previous = root
    for start in range(0, len(tokens) - page + 1, page):
        previous = hashlib.sha256(previous + np.asarray(tokens[start : start + page], np.int32).tobytes()).digest()
        keys.append(previous)
    return keys


def partial_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """A key for a page whose first slots hold `tokens`, fewer than a page, after the pages of `previous`."""
    return hashlib.sha256(previous + b"partial" + np.asarray(tokens, np.int32).tobytes()).digest()


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
            left=max((sequence.limit - sequence.committed for sequence in self.sequences), default=0),
        )

    def reserve(self, segment: Segment, most_tokens: int) -> Segment | None:
        """Gives every sequence the pages for `segment`, whose steps commit up to `most_tokens` each.

        Returns the segment, with fewer steps if pages do not last for all; None, with nothing changed, if not for one.
        """
        gain = segment.most_gain(most_tokens)
        num_steps = segment.num_steps
        while not self._affords(gain):
            num_steps //= 2
            if not num_steps:
                return None
            segment = segment.shortened(num_steps)
            gain = segment.most_gain(most_tokens)
        for sequence in self.sequences:
            if missing := self._num_missing(sequence, _reach(sequence, gain)):
                sequence.pages.extend(self.pool.allocate() for _ in range(missing))
                self._write(sequence)
        return segment

    def _affords(self, gain: int) -> bool:
        """Whether the pages last for `gain` more tokens of every sequence."""
        missing = sum(self._num_missing(sequence, _reach(sequence, gain)) for sequence in self.sequences)
        return missing <= self.pool.num_available

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
        spare = self.pool.num_available - num_new
        if spare < len(self.sequences) and spare < sum(map(self._may_grow, self.sequences)):
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

    def _may_grow(self, sequence: SequenceState) -> bool:
        """Whether `sequence` lacks pages that it needs if it gets as long as it may."""
        return self._num_missing(sequence, sequence.limit) > 0

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
