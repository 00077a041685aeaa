"""Parts of pictures of thoughts: columns of chunks, tokens as chips, states, thoughts; in inches, y downwards."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Circle

from detspec.traces.thoughts import Thought, ThoughtTrace
from detspec.viz.colours import BLUE, FAINT, INK
from detspec.viz.shapes import Point, Rect, arrow, box, label, printable

MARGIN = 0.4
GUTTER = 1.95
COLUMN = 1.52
GAP_COLUMN = 0.7
RIGHT = 1.6
# where a column's boxes begin, and how wide they are
LEFT_EDGE = 0.16
INNER = 1.32
CHIP_SIZE = 6.5
CHIP_CHAR = 0.0544
CHIP_PAD = 0.075
CHIP_LINE = 0.23
CHIP_GAP = 0.03
TOKEN_CHARS = 14
MAX_COLUMNS = 7  # a longer prompt leaves out a run of chunks in the middle
# most tokens drawn for a chunk, and for a thought or an answer
MAX_TOKENS = 32
MAX_SAID = 12
END = "<end>"


class Column(NamedTuple):
    """Where a chunk is drawn; `chunk` None stands for a run left out."""

    chunk: int | None
    x: float

    @property
    def left(self) -> float:
        """Left edge of its boxes."""
        return self.x + LEFT_EDGE

    @property
    def middle(self) -> float:
        """Centre of its boxes, or of the gap."""
        return self.left + INNER / 2 if self.chunk is not None else self.x + GAP_COLUMN / 2


class Chip(NamedTuple):
    """One token."""

    text: str
    colour: str = "white"
    faint: bool = False


def columns_of(trace: ThoughtTrace) -> list[Column]:
    """One column for each chunk that is drawn."""
    columns = []
    x = MARGIN + GUTTER
    for chunk in shown_places(len(trace.chunks), MAX_COLUMNS):
        columns.append(Column(chunk, x))
        x += GAP_COLUMN if chunk is None else COLUMN
    return columns


def shown_places(number: int, most: int) -> list[int | None]:
    """Which of `number` things are drawn: all, or the first and the last with None between for those left out.

    12 things, at most 7: 0 1 2 3 None 10 11
    """
    if number <= most:
        return list(range(number))
    tail = most // 3
    return [*range(most - 1 - tail), None, *range(number - tail, number)]


def chip_lines(chips: Sequence[Chip], width: float) -> list[list[Chip]]:
    """`chips` in lines of at most `width` inches, their texts as they are printed."""
    lines: list[list[Chip]] = [[]]
    for chip in chips:
        chip = chip._replace(text=printable(chip.text, TOKEN_CHARS))
        if lines[-1] and line_width([*lines[-1], chip]) > width:
            lines.append([])
        lines[-1].append(chip)
    return lines


def line_width(line: Sequence[Chip]) -> float:
    """Inches that a line of chips takes."""
    return sum(len(chip.text) * CHIP_CHAR + CHIP_PAD for chip in line) + CHIP_GAP * (len(line) - 1)


def draw_chips(axes: Axes, middle: float, top: float, lines: Sequence[Sequence[Chip]]) -> None:
    """Lines of chips, each centred."""
    for number, line in enumerate(lines):
        x = middle - line_width(line) / 2
        y = top + number * CHIP_LINE
        for chip in line:
            width = len(chip.text) * CHIP_CHAR + CHIP_PAD
            box(axes, Rect(x, y + 0.015, width, CHIP_LINE - 0.03), chip.colour, faint=chip.faint, rounding=0.03)
            colour = FAINT if chip.faint else INK
            label(axes, x + width / 2, y + CHIP_LINE / 2, chip.text, size=CHIP_SIZE, mono=True, color=colour)
            x += width + CHIP_GAP


def token_lines(trace: ThoughtTrace, chunk: int) -> list[list[Chip]]:
    """The tokens of a chunk; the answer follows those of the last one."""
    tokens = first_chips([Chip(text) for text in trace.chunks[chunk]], MAX_TOKENS)
    follow = answer_chips(trace) if chunk == len(trace.thoughts) and trace.answer else []
    return chip_lines([*tokens, *follow], INNER - 0.1)


def answer_chips(trace: ThoughtTrace) -> list[Chip]:
    """The tokens of the answer, cut if it is long; the end sign if it is empty."""
    return first_chips([Chip(text, BLUE) for text in trace.answer], MAX_SAID) or [Chip(END)]


def thought_chips(thought: Thought) -> list[Chip]:
    """A thought's tokens and its end; a long one is cut."""
    end = [Chip(END, "white", thought.trivial)] if thought.ended else []
    return [*first_chips([Chip(text, BLUE) for text in thought.tokens], MAX_SAID), *end]


def first_chips(chips: Sequence[Chip], most: int) -> list[Chip]:
    """All of `chips`, or the first ones and a sign that there are more."""
    return list(chips) if len(chips) <= most else [*chips[: most - 1], Chip("…", chips[-1].colour)]


def thought_text(thought: Thought, max_chars: int) -> str:
    """A thought on one line, cut if it is long; a trivial one is its end sign."""
    text = END if thought.trivial else " ".join(token.strip() for token in thought.tokens)
    return printable(text, max_chars).replace("·", " ")


def plus(axes: Axes, x: float, y: float, *, faint: bool) -> None:
    """The sign of a sum."""
    colour = FAINT if faint else INK
    axes.add_patch(Circle((x, y), 0.09, facecolor="white", edgecolor=colour, linewidth=0.9))
    axes.plot([x - 0.05, x + 0.05], [y, y], color=colour, linewidth=0.9)
    axes.plot([x, x], [y - 0.05, y + 0.05], color=colour, linewidth=0.9)


def elbow(axes: Axes, points: Sequence[Point], *, faint: bool) -> None:
    """A line along `points`; its last piece is an arrow."""
    colour = FAINT if faint else INK
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color=colour, linewidth=0.8 if faint else 1.1, linestyle=(0, (3, 2)) if faint else "-")
    arrow(axes, points[-2], points[-1], colour=colour)
