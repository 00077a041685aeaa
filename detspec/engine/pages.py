"""Whose page is whose: a pool of cache pages, shared by what they hold.

1. `allocate` hands out a free page, otherwise it evicts the least recently used cached one.
2. `register` says what a page holds, under a key from `prefix_keys`; `share` hands it out once more under that key.
3. `release` gives a page back. A registered page stays cached until it is needed for other contents.

A page has as many holders as sequences whose page table lists it. Only keys and values of the canonical pass are registered,
and whole pages of committed tokens are never written again, so holders cannot disturb each other.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from detspec.cache import SCRATCH_PAGE


class PagePool:
    """Pages 1 .. `num_pages`; page 0 is scratch and has no holder.

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
