"""Text of committed tokens: what may be shown of it, and where a stop string ends it."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a character decodes to of which not all bytes are there yet
DecodeFn = Callable[[Sequence[int]], str]


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
