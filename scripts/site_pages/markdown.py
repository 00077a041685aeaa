"""Links and headings of Markdown, as GitHub and the site read them; what is code holds neither."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[`~]*\s*?$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
OUTSIDE_IMAGE = re.compile(r"!\[([^\[\]]*)\]\((?:https?:)?//[^()\s]+\)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^(#{1,6}) +(.+?) *#*$", re.MULTILINE)
LIST_ITEM = re.compile(r"^ *(?:[*-]|\d+\.) ")
BULLET = re.compile(r"^[*-] ")
OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)  # https:, mailto:


class Link(NamedTuple):
    """A link or an image, written in place: `[text](target)`."""

    line: int  # from 1
    target: str

    @property
    def is_outside(self) -> bool:
        """Whether it leads out of the repository."""
        return OUTSIDE.match(self.target) is not None

    @property
    def path(self) -> str:
        """The file, as it is written; "" for the page itself."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        """The place in it; "" for its beginning."""
        return self.target.partition("#")[2]


def links(text: str) -> Iterator[Link]:
    """All links and images of `text`, in their order."""
    for match in LINK.finditer(without_code(text)):
        yield Link(text.count("\n", 0, match.start()) + 1, match[1])


def anchors(text: str) -> set[str]:
    """Anchors, which links have after "#": a name for each heading, as GitHub makes it."""
    found: set[str] = set()
    for _, title in headings(text):
        name, count = slug(title), 1
        while name in found:
            name, count = f"{slug(title)}-{count}", count + 1
        found.add(name)
    return found


def headings(text: str) -> Iterator[tuple[int, str]]:
    """Level and text of each heading."""
    prose = FENCE.sub(_blank, text)
    for match in HEADING.finditer(prose):
        yield len(match[1]), match[2]


def slug(title: str) -> str:
    """The name of a heading: "`pip install`, or not" is "pip-install-or-not"."""
    plain = re.sub(r"\]\([^)]*\)", "]", title)
    kept = re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", plain).strip().lower())
    return kept.replace(" ", "-")


def rewritten(text: str, target_of: Callable[[Link], str]) -> str:
    """`text` with each link's target replaced by what `target_of` returns for it."""
    parts, end = [], 0
    for match in LINK.finditer(without_code(text)):
        link = Link(text.count("\n", 0, match.start()) + 1, match[1])
        parts += [text[end : match.start(1)], target_of(link)]
        end = match.end(1)
    return "".join([*parts, text[end:]])


def without_outside_images(text: str) -> str:
    """`text` with the words of each image that lies on another host, such as a badge, in place of the image."""
    parts, end = [], 0
    for match in OUTSIDE_IMAGE.finditer(without_code(text)):
        parts += [text[end : match.start()], text[slice(*match.span(1))]]
        end = match.end()
    return "".join([*parts, text[end:]])


def with_blank_before_lists(text: str) -> str:
    """`text` with a blank line before each list that follows a paragraph at once: without it the site sees no list there."""
    lines: list[str] = []
    for line, shown in zip(text.split("\n"), FENCE.sub(_blank, text).split("\n"), strict=True):
        before = lines[-1] if lines else ""
        if BULLET.match(shown) and before.strip() and not before.startswith(" ") and not LIST_ITEM.match(before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def without_code(text: str) -> str:
    """`text` with blanks in place of code and comments, so that every position stays what it is."""
    for pattern in (FENCE, INLINE_CODE, COMMENT):
        text = pattern.sub(_blank, text)
    return text


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
