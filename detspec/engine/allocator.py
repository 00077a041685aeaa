"""The page tables of the rows: pages on demand, shared where two samples begin with the same tokens.

A sample of 150 prompt tokens with pages of 64: two whole pages, and 21 of the 22 tokens left in a partial one (the last
token of all is the first decoding step's):

    keys    [0 64) [64 128) [128 149)      another sample of this prompt holds the first two pages too, and copies the third

Samples whose prompt is read thinking share nothing: whoever skipped a page would know neither its thoughts nor their states.
"""

import numpy as np

from detspec.cache import SCRATCH_PAGE
from detspec.engine.pages import PagePool, partial_key, prefix_keys
from detspec.engine.sequence import SequenceState


class Allocator:
    """Hands pages to samples and writes them into `page_table [max_requests, max_pages]`."""

    def __init__(self, pool: PagePool, *, page: int, max_requests: int, max_pages: int, sharing: bool) -> None:
        """No row has pages."""
        self.pool = pool
        self.page = page
        self.page_table = np.full((max_requests, max_pages), SCRATCH_PAGE, np.int32)
        self._sharing = sharing
        self._filling: dict[bytes, SequenceState] = {}  # keys of pages that a row is about to fill

    def pages_for(self, num_positions: int) -> int:
        """Pages that so many positions take."""
        return -(-num_positions // self.page)

    def awaits(self, sample: SequenceState, context: bytes) -> bool:
        """Whether a row is just filling a page that `sample` could share, so that it had better come a little later."""
        if not self._sharing or sample.thinks:
            return False
        keys = self._keys(sample, context)
        missing = next((key for key in keys if self.pool.find(key) is None), None)
        return missing in self._filling

    def admit(
        self, sample: SequenceState, row: int, context: bytes, *, num_positions: int, headroom: int
    ) -> tuple[int, int] | None:
        """Gives `sample` pages for `num_positions`, shared ones first, and sets its `length` to what they hold.

        Args:
            sample: one that waits.
            row: a free row.
            context: digest of all that keys and values depend on besides tokens.
            num_positions: positions that it needs at once.
            headroom: pages to leave for others.

        Returns:
            Which page to copy over which before anything else, the scratch page over itself for none; None, with nothing
            changed, if there are too few pages.
        """
        keys = self._keys(sample, context) if self._sharing and not sample.thinks else []
        whole = (len(sample.tokens) - 1) // self.page
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
        length, copy = len(shared) * self.page, (SCRATCH_PAGE, SCRATCH_PAGE)
        source = self.pool.find(keys[whole]) if len(shared) == whole < len(keys) else None
        sample.pages = [*shared, *(self.pool.allocate() for _ in range(num_new))]
        if source is not None:
            # Held or not, the page keeps its contents until after the copy: whatever overwrites it is started later.
            length, copy = sample.prompt_len - 1, (source, sample.pages[whole])
        sample.row, sample.length = row, length
        sample.num_whole, sample.registered = whole, 0
        self._write(sample)
        for key in keys:
            if self.pool.find(key) is None:
                self._filling.setdefault(key, sample)
        self.register(sample)
        return copy

    def num_missing(self, sample: SequenceState, num_positions: int) -> int:
        """Pages that `sample` lacks for `num_positions`."""
        return max(0, self.pages_for(num_positions) - len(sample.pages))

    def grow(self, sample: SequenceState, num_positions: int) -> None:
        """Gives `sample` the pages that it lacks for `num_positions`; they must be available."""
        missing = self.num_missing(sample, num_positions)
        if missing:
            sample.pages.extend(self.pool.allocate() for _ in range(missing))
            self._write(sample)

    def register(self, sample: SequenceState) -> None:
        """Lets others share what the canonical pass has written of the prompt."""
        while sample.registered < len(sample.keys):
            index = sample.registered
            if sample.length < (self.page * (index + 1) if index < sample.num_whole else sample.prompt_len - 1):
                return
            self._settle(sample, sample.keys[index], sample.pages[index])
            sample.registered += 1

    def free(self, sample: SequenceState, context: bytes, *, keep: bool) -> None:
        """Takes the pages from `sample`; with `keep`, whole ones that the canonical pass wrote stay known by their contents."""
        if keep and self._sharing and not sample.thinks:
            known = min(sample.canonical, sample.length, len(sample.tokens))
            for key, page in zip(prefix_keys(context, sample.tokens[:known], self.page), sample.pages, strict=False):
                self.pool.register(key, page)
        for key in sample.keys:
            if self._filling.get(key) is sample:
                del self._filling[key]
        self.pool.release(sample.pages)
        self.page_table[sample.row] = SCRATCH_PAGE
        sample.row, sample.pages, sample.length, sample.keys = None, [], 0, []

    def _keys(self, sample: SequenceState, context: bytes) -> list[bytes]:
        """Keys of the whole pages; and of the partial one, if there is one and it is the prompt's."""
        if not sample.keys:
            needed = sample.tokens[:-1]
            sample.keys = prefix_keys(context, needed, self.page)
            tail = needed[len(sample.keys) * self.page :]
            if tail and len(sample.tokens) == sample.prompt_len:
                sample.keys.append(partial_key(sample.keys[-1] if sample.keys else context, tail))
        return sample.keys

    def _settle(self, sample: SequenceState, key: bytes, page: int) -> None:
        self.pool.register(key, page)
        if self._filling.get(key) is sample:
            del self._filling[key]

    def _write(self, sample: SequenceState) -> None:
        self.page_table[sample.row, : len(sample.pages)] = sample.pages
