"""Text of committed tokens: what may be shown of it, and where a stop string ends it."""

from collections.abc import Callable, Sequence

CONTEXT = 16  # tokens that are decoded again to see what comes after them
UNFINISHED = "\ufffd"  # what a character decodes to of which not all bytes are there yet
DecodeFn = Callable[[Sequence[int]], str]


class GrowingText:
    """The text of tokens that come bit by bit. Each time only the last ones are decoded, so `n` tokens take `n` times as long.

    What a token reads as depends on the ones before it: bytes make a character, and a text's first space is left out. So the
    last of those whose text is known are decoded again, and what they read as is cut off:

        tokens   0 .. 15    16 .. 31 | 32 .. 40       decoded: 16 .. 40, new is what follows the text of 16 .. 31
    """

    def __init__(self, begin: int = 0) -> None:
        """A text whose first token has the number `begin`."""
        self._first = begin
        self._begin = begin  # first token that is decoded again
        self._known = ""  # text of all tokens up to some place
        self._again = ""  # its end, the text of those from `_begin` on

    def of(self, ids: Sequence[int], decode_fn: DecodeFn) -> str:
        """The text of all of `ids` from the first one on; `ids` begin with those of the last call."""
        tail = decode_fn(ids[self._begin :])
        if not tail.startswith(self._again):  # a byte that spoils others before it, which made a character
            self._begin = self._first
            self._known = self._again = ""
            tail = decode_fn(ids[self._first :])
        text = self._known + tail[len(self._again) :]
        if len(ids) - self._begin >= 2 * CONTEXT and not text.endswith(UNFINISHED):
            begin = len(ids) - CONTEXT
            again = decode_fn(ids[begin:])
            # Special tokens read as nothing, after which the next one would be a text's first.
            if again and text.endswith(again):
                self._begin = begin
                self._known = text
                self._again = again
        return text


def find_stop(
    decode_fn: DecodeFn, ids: Sequence[int], stop: Sequence[str], *, first: int, begin: int
) -> tuple[int, str] | None:
    """The fewest tokens of `ids`, at least `first`, whose text holds a string of `stop`, and the text before that string.

    What is found depends on `ids` alone: text only ever grows at its end, so whether the first `n` tokens hold a string is
    monotone in `n`. Fewer tokens than `first` are known not to end the text. Within the first `begin` tokens, those of
    `min_tokens`, no string ends it.
    """
    ignored = len(decode_fn(ids[:begin]).rstrip(UNFINISHED)) if begin else 0

    def place(number: int) -> int:
        text = decode_fn(ids[:number])
        found = (text.find(string, max(0, ignored - len(string) + 1)) for string in stop)
        return min((at for at in found if at >= 0), default=-1)

    if place(len(ids)) < 0:
        return None
    low = max(first, 1)
    high = len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if place(middle) >= 0 else (middle + 1, high)
    return low, decode_fn(ids[:low])[: place(low)]


def showable(text: str, stop: Sequence[str]) -> str:
    """What of an unfinished `text` will stay: no half characters, and no end that a stop string may begin with."""
    text = text.rstrip(UNFINISHED)
    longest = max((len(string) for string in stop), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(string.startswith(text[start:]) for string in stop):
            return text[:start]
    return text
