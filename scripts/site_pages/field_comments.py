"""Comments on the fields of a class, which are their documentation.

A field's comment stands behind it, or in the lines above it:

    page: int = 64  # slots of one cache page
    # products with weights. "xla": as the compiler likes them.
    linear: str = "xla"
"""

import functools
import tokenize
from pathlib import Path
from typing import NamedTuple


class Comment(NamedTuple):
    """A comment of a file."""

    text: str
    is_alone: bool  # it has the line for itself


def comment_of(found: dict[int, Comment], first: int, last: int) -> str:
    """Comment on the field in lines `first` to `last`: the comment behind it, else the lines of comments right above."""
    if behind := [found[line].text for line in range(first, last + 1) if line in found]:
        return " ".join(behind)
    above: list[str] = []
    line = first - 1
    while line in found and found[line].is_alone:
        above.insert(0, found[line].text)
        line -= 1
    return " ".join(above)


@functools.cache
def comments(path: Path) -> dict[int, Comment]:
    """The comments of the Python file at `path`, by line."""
    with path.open("rb") as file:
        return {
            token.start[0]: Comment(token.string.lstrip("# "), not token.line[: token.start[1]].strip())
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.COMMENT
        }
