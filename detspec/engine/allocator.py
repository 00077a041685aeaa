"""The page tables of the sequences: pages on demand, shared where two of them begin with the same tokens.

A sequence of 150 prompt tokens with pages of 64: two whole pages, and 21 of the 22 tokens left in a partial one (the last
token of all is the first decoding step's):

    keys    [0 64) [64 128) [128 149)      another sample of this prompt holds the first two pages too, and copies the third

Prompts that are read with thoughts share nothing: a sequence that skipped a page would lack its thoughts and their states.
"""

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.pages import PagePool, partial_key, prefix_keys
from detspec.engine.sequence import SequenceState


class Allocator:
    """Hands pages to sequences and writes them into `page_table [max_requests, max_pages]`."""

    def __init__(self, pool: PagePool, *, page: int, max_requests: int, max_pages: int, sharing: bool) -> None:
        self.pool = pool
        self.page = page
        self.page_table = np.full((max_requests, max_pages), SCRATCH_PAGE, np.int32)
        self._sharing = sharing
        self._filling: dict[bytes, SequenceState] = {}  # keys of pages that a sequence is about to fill

    def pages_for(self, num_positions: int) -> int:
        """Pages that so many positions take."""
        return -(-num_positions // self.page)

    def num_shared(self, sequence: SequenceState) -> int:
        """Pages that hold the beginning of `sequence` already."""
        if not self._sharing or sequence.thinks:
            return 0
        is_there = [self.pool.find(key) is not None for key in self._keys(sequence)]
        return [*is_there, False].index(False)

    def awaits(self, sequence: SequenceState) -> bool:
        """Whether another sequence is just filling a page that `sequence` could share if it came a little later."""
        if not self._sharing or sequence.thinks:
            return False
        keys = self._keys(sequence)
        missing = next((key for key in keys if self.pool.find(key) is None), None)
        return missing in self._filling

    def admit(self, sequence: SequenceState, place: int, *, num_positions: int, headroom: int) -> tuple[int, int] | None:
        """Gives a waiting `sequence` pages for `num_positions`, shared ones first, and sets its `length` to what they hold.

        Returns which page to copy over which before anything else, the scratch page over itself for none; None, with nothing
        changed, if there are too few pages to leave `headroom` of them for others.
        """
        keys = self._keys(sequence) if self._sharing and not sequence.thinks else []
        whole = (len(sequence.tokens) - 1) // self.page
        shared: list[int] = []
        for key in keys[:whole]:
            page = self.pool.share(key)
            if page is None:
                break
            shared.append(page)
        num_new = max(self.pages_for(num_positions) - len(shared), 0)
        if self.pool.num_available < num_new + headroom:
            self.pool.release(shared)
            return None
        length = len(shared) * self.page
        copy = SCRATCH_PAGE, SCRATCH_PAGE
        source = self.pool.find(keys[whole]) if len(shared) == whole < len(keys) else None
        sequence.pages = [*shared, *(self.pool.allocate() for _ in range(num_new))]
        if source is not None:
            # Held or not, the page keeps its contents until after the copy: what overwrites it is started later.
            length = sequence.prompt_len - 1
            copy = source, sequence.pages[whole]
        sequence.place = place
        sequence.length = length
        sequence.num_whole = whole
        sequence.registered = 0
        self._write(sequence)
        for key in keys:
            if self.pool.find(key) is None:
                self._filling.setdefault(key, sequence)
        self.register(sequence)
        return copy

    def num_missing(self, sequence: SequenceState, num_positions: int) -> int:
        """Pages that `sequence` lacks for `num_positions`."""
        return max(0, self.pages_for(num_positions) - len(sequence.pages))

    def grow(self, sequence: SequenceState, num_positions: int) -> None:
        """Gives `sequence` the pages that it lacks for `num_positions`; they must be available."""
        missing = self.num_missing(sequence, num_positions)
        if missing:
            sequence.pages.extend(self.pool.allocate() for _ in range(missing))
            self._write(sequence)

    def register(self, sequence: SequenceState) -> None:
        """Lets other sequences share what the canonical pass has written of the prompt."""
        while sequence.registered < len(sequence.keys):
            index = sequence.registered
            if sequence.length < (self.page * (index + 1) if index < sequence.num_whole else sequence.prompt_len - 1):
                return
            self.pool.register(sequence.keys[index], sequence.pages[index])
            self._stop_filling(sequence, sequence.keys[index])
            sequence.registered += 1

    def free(self, sequence: SequenceState, *, keep: bool) -> None:
        """Takes the pages from `sequence`; with `keep`, whole pages that the canonical pass wrote stay in the prefix cache."""
        if keep and self._sharing and not sequence.thinks:
            known = min(sequence.canonical, sequence.length, len(sequence.tokens))
            for key, page in zip(prefix_keys(self.pool.root, sequence.tokens[:known], self.page), sequence.pages, strict=False):
                self.pool.register(key, page)
        for key in sequence.keys:
            self._stop_filling(sequence, key)
        self.pool.release(sequence.pages)
        self.page_table[sequence.place] = SCRATCH_PAGE
        sequence.place = None
        sequence.pages = []
        sequence.keys = []
        sequence.length = 0

    def _keys(self, sequence: SequenceState) -> list[bytes]:
        """Keys of the whole pages; and of the partial one, if there is one and it is the prompt's."""
        if not sequence.keys:
            needed = sequence.tokens[:-1]
            sequence.keys = prefix_keys(self.pool.root, needed, self.page)
            tail = needed[len(sequence.keys) * self.page :]
            if tail and len(sequence.tokens) == sequence.prompt_len:
                sequence.keys.append(partial_key(sequence.keys[-1] if sequence.keys else self.pool.root, tail))
        return sequence.keys

    def _stop_filling(self, sequence: SequenceState, key: bytes) -> None:
        if self._filling.get(key) is sequence:
            del self._filling[key]

    def _write(self, sequence: SequenceState) -> None:
        self.page_table[sequence.place, : len(sequence.pages)] = sequence.pages
