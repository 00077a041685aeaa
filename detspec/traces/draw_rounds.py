"""Draws the passes that read a prompt with thoughts: a line per pass, a column per chunk, its draft and the verdict."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from detspec.traces.thoughts import ThoughtPass, ThoughtText, ThoughtTrace
from detspec.viz.colours import BLUE, BROWN, FAINT, GREEN, MARK_COLOURS, RED, RULE, YELLOW
from detspec.viz.shapes import Rect, block, draw_legend, label, printable, remarks, shown_places, subscript, with_gaps

MARGIN = 0.4
GUTTER = 1.95
COLUMN = 1.52
GAP_COLUMN = 0.7
RIGHT = 1.6
# where a column's boxes begin, and how wide they are
LEFT_EDGE = 0.16
INNER = 1.32
MAX_COLUMNS = 7  # a longer prompt leaves out a run of chunks in the middle
END = "<end>"
HEADING = 0.98
LINE = 1.02
GAP_LINE = 0.35
CLOSING = 0.75
LEGEND = 0.5
BLOCK = 0.29
BLOCK_WIDTH = INNER - 0.16
TEXT_SIZE = 7.0
TEXT_CHARS = 14
MAX_LINES = 9  # a reading of more passes leaves out a run in the middle
MEANINGS = (
    (BLUE, "committed", False),
    (YELLOW, "drafted", False),
    (GREEN, "✓ draft accepted", False),
    (GREEN, "✗ draft rejected, corrected", True),
    (RED, "void", False),
    (BROWN, "state that is not 0", False),
)


class Column(NamedTuple):
    """A chunk's place in the picture; `chunk` None stands for a run left out."""

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


def columns_of(trace: ThoughtTrace) -> list[Column]:
    """Lays out a column for each chunk that is drawn."""
    columns = []
    x = MARGIN + GUTTER
    for chunk in shown_places(len(trace.chunks), MAX_COLUMNS):
        columns.append(Column(chunk, x))
        x += GAP_COLUMN if chunk is None else COLUMN
    return columns


def rounds_height(trace: ThoughtTrace, columns: Sequence[Column]) -> float:
    """The height that `draw_rounds` takes, in inches."""
    lines = shown_passes(trace, [column.chunk for column in columns])
    return HEADING + sum(GAP_LINE if number is None else LINE for number in lines) + CLOSING + LEGEND


def shown_passes(trace: ThoughtTrace, chunks: Collection[int | None]) -> list[int | None]:
    """The passes that read any of `chunks`, whose None stands for no chunk; a None among the passes is a run left out."""
    reading = [i for i, one in enumerate(trace.passes) if any(chunk in range(one.first, one.end) for chunk in chunks)]
    return with_gaps([reading[place] for place in shown_places(len(reading), MAX_LINES) if place is not None])


def draw_rounds(axes: Axes, trace: ThoughtTrace, columns: Sequence[Column], top: float) -> None:
    """Draws from `top` down the passes, how the answer came about, and a legend."""
    label(axes, MARGIN, top + 0.2, "Rounds of speculation: draft, verify, commit by index", size=13.0, ha="left", weight="bold")
    rules = (
        "A pass reads all chunks that are left at once, or as many as it holds; each gets the state of the thought drafted for "
        "the chunk before it.",
        "Drafts before the first rejected one are committed, then the pass's own thought. What follows was read with a wrong "
        "state: it is void, and the next pass reads it again.",
    )
    remarks(axes, MARGIN, top + 0.46, rules, step=0.19, size=8.0)
    y = top + HEADING
    lines = shown_passes(trace, [column.chunk for column in columns])
    for before, number, after in zip([None, *lines], lines, [*lines[1:], None], strict=False):
        if number is not None:
            draw_pass(axes, trace, number, columns, y)
            y += LINE
        elif before is not None and after is not None:
            first = trace.passes[before + 1]
            last = trace.passes[after - 1]
            passes = f"passes {before + 2} to {after} are" if after - before > 2 else f"pass {after} is"
            text = f"⋮   {passes} left out: from read {first.first} to read {last.read}"
            label(axes, MARGIN, y + GAP_LINE / 2 - 0.04, text, size=8.0, ha="left", color=FAINT)
            y += GAP_LINE
    draw_closing(axes, trace, columns, y)
    draw_legend(axes, MARGIN, y + CLOSING + 0.12, MEANINGS)


def draw_pass(axes: Axes, trace: ThoughtTrace, number: int, columns: Sequence[Column], top: float) -> None:
    """Draws a pass: for each chunk the state it was given, the draft after it, and the verdict."""
    one = trace.passes[number]
    reads = f"chunks {one.first} to {one.end - 1}" if one.end - one.first > 1 else f"chunk {one.first}"
    right = draw_heading(axes, columns, top, f"pass {number + 1}", f"reads {reads}")
    for y, what in ((0.12, "state given"), (0.35, "draft"), (0.71, "verdict")):
        label(axes, MARGIN + GUTTER + 0.06, top + y, what, size=7.0, ha="right", color=FAINT)
    for column in columns:
        if column.chunk is None:
            label(axes, column.middle, top + 0.5, "⋯", size=12.0, color=FAINT)
        elif column.chunk < one.first:
            draw_block(axes, column, top + 0.57, BLUE, subscript("Z", column.chunk), trace.thoughts[column.chunk])
        elif column.chunk < one.end:
            draw_verdict(axes, trace, one, column, top)
        elif column.chunk < len(trace.thoughts):
            label(axes, column.left + BLOCK_WIDTH / 2, top + 0.5, "not in this pass", size=7.0, color=FAINT)
    x = right + 0.12
    label(axes, x, top + 0.36, f"read {one.read}", size=9.0, ha="left", weight="bold")
    label(axes, x, top + 0.54, f"length {one.length}", size=9.0, ha="left", weight="bold")
    outcome = f"{one.accepted} of {len(one.drafts)} accepted{', 1 corrected' if one.rejected else ''}"
    label(axes, x, top + 0.72, outcome, size=7.0, ha="left", color=FAINT)


def draw_verdict(axes: Axes, trace: ThoughtTrace, one: ThoughtPass, column: Column, top: float) -> None:
    """Draws a chunk in a pass."""
    assert column.chunk is not None
    depth = column.chunk - one.first
    name = subscript("Z", column.chunk)
    label(axes, column.left + BLOCK_WIDTH / 2, top + 0.12, given(trace, one, column.chunk), size=7.0, color=FAINT)
    draw_block(axes, column, top + 0.21, YELLOW, f"{name}'", one.drafts[depth])
    if depth >= len(one.thoughts):
        draw_block(axes, column, top + 0.57, RED, name, ThoughtText(("void",)))
        return
    right = depth < one.accepted
    draw_block(axes, column, top + 0.57, GREEN, name, one.thoughts[depth], hatched=not right)
    mark = "✓" if right else "✗"
    label(axes, column.left + BLOCK_WIDTH + 0.1, top + 0.35, mark, size=12.0, color=MARK_COLOURS[mark], weight="bold")


def given(trace: ThoughtTrace, one: ThoughtPass, chunk: int) -> str:
    """The state that `chunk` was read with: from the committed or drafted thought after the previous chunk."""
    if chunk == one.first:
        return state_text(chunk, trace.thoughts[chunk - 1] if chunk else ThoughtText(), "")
    return state_text(chunk, one.drafts[chunk - 1 - one.first], "'")


def state_text(chunk: int, before: ThoughtText, sign: str) -> str:
    """The state of `chunk`, from the thought `before` it; `sign` marks a draft."""
    return f"{subscript('S', chunk)} = " + ("0" if before.trivial else f"C({subscript('Z', chunk - 1)}{sign})")


def draw_closing(axes: Axes, trace: ThoughtTrace, columns: Sequence[Column], top: float) -> None:
    """Draws the last chunk and the answer."""
    last = len(trace.thoughts)
    right = draw_heading(axes, columns, top, "answer", f"chunk {last}, then decoding")
    for column in columns:
        if column.chunk is None:
            label(axes, column.middle, top + 0.4, "⋯", size=12.0, color=FAINT)
        elif column.chunk < last:
            draw_block(axes, column, top + 0.25, BLUE, subscript("Z", column.chunk), trace.thoughts[column.chunk])
        else:
            state = state_text(last, trace.thoughts[-1], "")
            label(axes, column.left + BLOCK_WIDTH / 2, top + 0.12, state, size=7.0, color=FAINT)
            draw_block(axes, column, top + 0.25, BLUE, "", ThoughtText(trace.answer))
    x = right + 0.12
    passes = len(trace.passes)
    label(axes, x, top + 0.32, f"{passes} pass{'' if passes == 1 else 'es'}", size=9.0, ha="left", weight="bold")
    label(axes, x, top + 0.5, f"for {last} chunk{'' if last == 1 else 's'}", size=7.0, ha="left", color=FAINT)


def draw_heading(axes: Axes, columns: Sequence[Column], top: float, name: str, remark: str) -> float:
    """Draws a rule over a line of the panel, and its name on the left; returns the right end of its columns."""
    right = columns[-1].left + INNER
    axes.plot([MARGIN, right + RIGHT - 0.05], [top - 0.04, top - 0.04], color=RULE, linewidth=0.8)
    label(axes, MARGIN, top + 0.3, name, size=10.0, ha="left", weight="bold")
    label(axes, MARGIN, top + 0.49, remark, size=8.0, ha="left", color=FAINT)
    return right


def draw_block(
    axes: Axes, column: Column, y: float, colour: str, symbol: str, thought: ThoughtText, hatched: bool = False
) -> None:
    """Draws a thought in the panel, as much of it as fits next to `symbol`."""
    text = thought_text(thought, TEXT_CHARS - len(symbol.rstrip("'")))
    at = Rect(column.left - 0.03, y, BLOCK_WIDTH + 0.03, BLOCK)
    block(axes, at, colour, symbol, text, hatched=hatched, size=TEXT_SIZE)


def thought_text(thought: ThoughtText, max_chars: int) -> str:
    """A thought on one line, cut if it is long; a trivial one is its end sign."""
    text = END if thought.trivial else " ".join(token.strip() for token in thought.tokens)
    return printable(text, max_chars).replace("·", " ")
