"""Two texts side by side in a terminal, with the first place marked at which they differ."""

import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

LINES_BEFORE = 3
SHOWN_LINES = 9
WIDTH = 100  # where there is no terminal
MOST_WIDTH = 120
RED = "\x1b[1;97;41m"
PLAIN = "\x1b[0m"
GAP = "  │ "

Marked = tuple[str, bool]  # a character, and whether it is marked


def side_by_side(texts: Mapping[str, tuple[str, str, str]]) -> str:
    """Two columns of lines around the middle parts of texts (before, middle, after), which are marked.

    The mark is a colour on a terminal, unless `NO_COLOR` is set, and guillemets elsewhere.
    """
    total = min(shutil.get_terminal_size((WIDTH, 24)).columns, MOST_WIDTH)
    width = (total - 2 - len(GAP)) // 2 - 2  # two for the mark
    columns = [[[(c, False) for c in label], [], *excerpt(parts, width)] for label, parts in texts.items()]
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    rows = itertools.zip_longest(*columns, fillvalue=[])
    return "\n".join(("  " + GAP.join(drawn(line, width, colours=colours) for line in row)).rstrip() for row in rows)


def excerpt(parts: tuple[str, str, str], width: int) -> list[list[Marked]]:
    """Lines of at most `width` characters around the middle part."""
    before, middle, after = (part.replace("\t", " ") for part in parts)
    if not middle.strip():  # signs stand for blanks
        middle = middle.replace(" ", "·").replace("\n", "⏎\n") or "∅"
    cells = [*((c, False) for c in before), *((c, c != "\n") for c in middle), *((c, False) for c in after)]
    lines: list[list[Marked]] = [[]]
    for cell in cells:
        if cell[0] == "\n":
            lines.append([])
        else:
            lines[-1].append(cell)
    marks = [[is_marked for _, is_marked in line] for line in lines]
    at = next(number for number, line in enumerate(marks) if any(line))
    left = marks[at].index(True)
    skipped = min(left, max(0, left + sum(marks[at]) - width + 4))  # the mark is always within the column
    shown = slice(max(0, at - LINES_BEFORE), max(0, at - LINES_BEFORE) + SHOWN_LINES)
    return [line[skipped if number == at else 0 :][:width] for number, line in enumerate(lines)][shown]


def drawn(line: Sequence[Marked], width: int, *, colours: bool) -> str:
    """A line of `width` columns."""
    begin, end = (RED, PLAIN) if colours else ("«", "»")
    drawn_line = ""
    free = width + 2 - len(line)
    for is_marked, cells in itertools.groupby(line, key=lambda cell: cell[1]):
        text = "".join(c for c, _ in cells)
        drawn_line += f"{begin}{text}{end}" if is_marked else text
        free -= 0 if colours or not is_marked else len(begin) + len(end)
    return drawn_line + " " * free
