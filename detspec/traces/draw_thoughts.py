"""Draws how a prompt was read with thoughts, a column per chunk and the passes below, and saves the picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from detspec.traces.draw_rounds import COLUMN, END, INNER, MARGIN, RIGHT, Column, columns_of, draw_rounds, rounds_height
from detspec.traces.thoughts import ThoughtText, ThoughtTrace
from detspec.viz.colours import BLUE, BROWN, FAINT, GREY, INK, PALE_BLUE, TEAL
from detspec.viz.figures import save_figure
from detspec.viz.shapes import Rect, arrow, box, canvas, cylinder, elbow, label, plus, printable, remarks, subscript

TITLE = 0.6
HEADING = 0.7
STATE = Rect(0.02, -0.14, 0.42, 0.28)  # a state's box, from the left edge of a column's boxes and the line of L_in
LAYERS = 0.5
CHIP_SIZE = 6.5
CHIP_CHAR = 0.0544
CHIP_PAD = 0.075
CHIP_LINE = 0.23
CHIP_GAP = 0.03
TOKEN_CHARS = 14
# most tokens drawn for a chunk, and for a thought or an answer
MAX_TOKENS = 32
MAX_SAID = 12
MIN_WIDTH = 10.6  # what the title and the legend need


class Chip(NamedTuple):
    """A token in its small box."""

    text: str
    colour: str = "white"
    faint: bool = False


class Levels(NamedTuple):
    """Heights of the parts of all columns, from top to bottom."""

    thoughts: float  # lower edge of the thoughts
    pair: float  # upper edge of T and C
    out: float  # the line of L_out
    layers: float  # upper edge of the layers between the two lines
    added: float  # the line of L_in
    first: float  # upper edge of the layers up to L_in
    tokens: float  # upper edge of the tokens
    bottom: float


def save_thoughts(trace: ThoughtTrace, path: str | Path) -> list[Path]:
    """Writes `thought_figure` as `path.svg` (the same bytes for the same trace) and `path.png`; returns both paths.

    Needs no display.
    """
    return save_figure(thought_figure(trace), path)


def thought_figure(trace: ThoughtTrace) -> Figure:
    """Draws the chunks with states and thoughts, and the passes below; a long prompt leaves out a run, and says so."""
    columns = columns_of(trace)
    levels = levels_of(trace, columns, TITLE + HEADING)
    width = max(columns[-1].x + COLUMN + RIGHT + MARGIN, MIN_WIDTH)
    figure, axes = canvas(width, levels.bottom + rounds_height(trace, columns))
    label(axes, MARGIN, 0.33, trace.title, size=min(11.0, 105.0 * width / max(len(trace.title), 1)), ha="left", weight="bold")
    heading = f"Read in chunks of {trace.chunk} tokens, a thought after each"
    label(axes, MARGIN, TITLE + 0.2, heading, size=13.0, ha="left", weight="bold")
    label(axes, MARGIN, TITLE + 0.46, _remark(trace, columns), size=8.0, ha="left", color=FAINT)
    draw_lines(axes, trace, columns, levels)
    draw_gutter(axes, trace, levels)
    for before, column, after in zip([None, *columns], columns, [*columns[1:], None], strict=False):
        if column.chunk is None:
            for y in (levels.pair + 0.17, levels.layers + LAYERS / 2, levels.tokens + 0.2):
                label(axes, column.middle, y, "⋯", size=14.0)
            continue
        draw_stream(axes, trace, column, levels)
        draw_state(axes, trace, before, column, levels)
        if column.chunk < len(trace.thoughts):
            draw_thought(axes, trace, column, after, levels)
        else:
            draw_answer(axes, trace, column, levels)
    draw_rounds(axes, trace, columns, levels.bottom)
    return figure


def levels_of(trace: ThoughtTrace, columns: Sequence[Column], top: float) -> Levels:
    """The levels below `top`, with room for the longest thought and the longest chunk of tokens."""
    shown = [column.chunk for column in columns if column.chunk is not None]
    thoughts = [thought_chips(trace.thoughts[chunk]) for chunk in shown if chunk < len(trace.thoughts)]
    most = max(len(chip_lines(chips)) for chips in (*thoughts, answer_chips(trace)))
    bottom = top + 0.2 + most * CHIP_LINE + 0.1
    pair = bottom + 0.34
    out = pair + 0.34 + 0.24
    layers = out + 0.26
    added = layers + LAYERS + 0.42
    first = added + 0.3
    tokens = first + 0.3 + 0.28
    lines = max(len(token_lines(trace, chunk)) for chunk in shown)
    return Levels(bottom, pair, out, layers, added, first, tokens, tokens + lines * CHIP_LINE + 0.12 + 0.6)


def draw_lines(axes: Axes, trace: ThoughtTrace, columns: Sequence[Column], levels: Levels) -> None:
    """Draws the parts that run through all columns: the lines of L_in and L_out, and the cache behind the layers."""
    left = columns[0].x
    right = columns[-1].left + INNER
    corner = (left - 0.02, levels.layers - 0.09)
    axes.add_patch(Rectangle(corner, right - left + 0.09, LAYERS + 0.18, facecolor=PALE_BLUE, edgecolor="none"))
    in_layer, out_layer, _ = trace.layers
    for y, name, layer in ((levels.out, "Lᵒᵘᵗ", out_layer), (levels.added, "Lⁱⁿ", in_layer)):
        axes.plot([left, right + 0.07], [y, y], color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)
        label(axes, right + 0.14, y - 0.02, name, size=10.0, ha="left", weight="bold")
        place = f"after layer {layer}" if layer else "the embeddings"
        label(axes, right + 0.14, y + 0.17, place, size=8.0, ha="left", color=FAINT)
    cached = ("each chunk writes its", "keys and values and", "reads those before it")
    remarks(axes, right + 0.14, levels.layers + 0.13, cached, size=7.5)


def draw_gutter(axes: Axes, trace: ThoughtTrace, levels: Levels) -> None:
    """Draws the names of the levels, and the KV cache to the left of the layers."""
    names = (
        (levels.thoughts - 0.3, "thoughts Z", ("a few tokens each, up to an", "end token; faint: nothing to think")),
        (levels.pair + 0.05, "thinker T, compressor C", ("T reads a chunk and says its", "thought, C makes it a state")),
        (levels.added + 0.04, "states S", ("added to the next chunk;", "0 if there was nothing to think")),
        (levels.tokens + 0.1, "input", ("the prompt, and", "the answer in blue")),
    )
    for y, name, said in names:
        label(axes, MARGIN, y, name, size=9.0, ha="left", weight="bold")
        remarks(axes, MARGIN, y + 0.18, said)
    middle = levels.layers + LAYERS / 2
    x = MARGIN + 0.3
    number = min(len(trace.thoughts), 12)
    cylinder(axes, x, middle - 0.32, 0.56, [(BLUE, 0.6 / number)] * number)
    label(axes, x + 0.38, middle - 0.14, "KV cache", ha="left", weight="bold")
    filled = (f"{len(trace.thoughts) * trace.chunk} slots", "after reading")
    remarks(axes, x + 0.38, middle + 0.03, filled, step=0.13)
    arrow(axes, (MARGIN + 1.42, middle), (MARGIN + 1.88, middle), strong=True)


def draw_stream(axes: Axes, trace: ThoughtTrace, column: Column, levels: Levels) -> None:
    """Draws a chunk's tokens and the layers over them."""
    assert column.chunk is not None
    in_layer, out_layer, num_layers = trace.layers
    is_last = column.chunk == len(trace.thoughts)
    lines = token_lines(trace, column.chunk)
    height = len(lines) * CHIP_LINE + 0.12
    box(axes, Rect(column.left, levels.tokens, INNER, height), "white")
    draw_chips(axes, column.middle, levels.tokens + 0.06, lines)
    start = column.chunk * trace.chunk
    name = f"chunk {column.chunk}" + (" (the last)" if is_last else "")
    label(axes, column.middle, levels.tokens + height + 0.12, name, size=8.0)
    end = start + len(trace.chunks[column.chunk]) - 1
    places = f"positions {start} to {end}" if end > start else f"position {start}"
    label(axes, column.middle, levels.tokens + height + 0.27, places, size=7.0, color=FAINT)
    for y, tall, text in (
        (levels.first, 0.3, _layers(1, in_layer)),
        (levels.layers, LAYERS, _layers(in_layer + 1, num_layers if is_last else out_layer)),
    ):
        box(axes, Rect(column.left, y, INNER, tall), GREY)
        label(axes, column.middle, y + tall / 2, text, size=8.0)
    steps = {levels.tokens: levels.first + 0.3, levels.first: levels.added + 0.09, levels.added - 0.09: levels.layers + LAYERS}
    for start_y, end_y in steps.items():
        arrow(axes, (column.middle, start_y), (column.middle, end_y), colour=INK)


def draw_state(axes: Axes, trace: ThoughtTrace, before: Column | None, column: Column, levels: Levels) -> None:
    """Draws the state that a chunk is given, and its line from the previous thought."""
    assert column.chunk is not None
    x = column.left + STATE.x
    y = levels.added
    faint = column.chunk == 0 or trace.thoughts[column.chunk - 1].trivial
    plus(axes, column.middle, y, faint=faint)
    name = subscript("S", column.chunk)
    box(axes, Rect(x, y + STATE.y, STATE.width, STATE.height), "white" if faint else BROWN, faint=faint)
    text = f"{name} = 0" if faint else name
    label(axes, x + STATE.width / 2, y, text, size=6.5 if faint else 9.0, color=FAINT if faint else INK)
    end = x + STATE.width
    elbow(axes, [(end, y), (end, y), (column.middle - 0.09, y)], faint=faint)
    if before is None:
        return
    lane = column.x + 0.05
    if before.chunk is None:
        elbow(axes, [(before.middle + 0.15, y), (before.middle + 0.15, y), (x, y)], faint=faint)
    else:
        corner = levels.pair + 0.17
        elbow(axes, [(before.left + INNER - 0.04, corner), (lane, corner), (lane, y), (x, y)], faint=faint)


def draw_thought(axes: Axes, trace: ThoughtTrace, column: Column, after: Column | None, levels: Levels) -> None:
    """Draws T and C above a chunk, and the thought above both."""
    assert column.chunk is not None
    thought = trace.thoughts[column.chunk]
    faint = thought.trivial
    said = column.left + 0.32
    written = column.left + INNER - 0.32
    top = draw_said(axes, column.middle, levels.thoughts, thought_chips(thought), faint=faint)
    look: dict[str, Any] = {"size": 8.0, "color": FAINT} if faint else {"size": 10.0, "weight": "bold"}
    label(axes, column.middle, top - 0.12, subscript("Z", column.chunk), **look)
    for x, letter in ((said, "T"), (written, "C")):
        quiet = faint and letter == "C"
        box(axes, Rect(x - 0.28, levels.pair, 0.56, 0.34), "white" if quiet else TEAL, faint=quiet)
        label(axes, x, levels.pair + 0.17, letter, size=10.0, weight="bold", color=FAINT if quiet else INK)
    arrow(axes, (said, levels.layers), (said, levels.pair + 0.34), colour=INK)
    arrow(axes, (said, levels.pair), (said, levels.thoughts), colour=INK)
    arrow(axes, (written, levels.thoughts), (written, levels.pair), colour=FAINT if faint else INK)
    if after is not None and after.chunk is None:
        y = levels.pair + 0.17
        elbow(axes, [(written + 0.28, y), (written + 0.28, y), (after.middle - 0.15, y)], faint=faint)


def draw_answer(axes: Axes, trace: ThoughtTrace, column: Column, levels: Levels) -> None:
    """Draws the text that the model continues with after the last chunk."""
    top = draw_said(axes, column.middle, levels.thoughts, answer_chips(trace))
    label(axes, column.middle, top - 0.12, "the answer", size=9.0, weight="bold")
    arrow(axes, (column.middle, levels.layers), (column.middle, levels.thoughts), colour=INK)
    remarks(axes, column.middle + 0.07, levels.pair + 0.09, ("no thought", "follows here"), step=0.16)


def _remark(trace: ThoughtTrace, columns: Sequence[Column]) -> str:
    text = "A thought becomes a state, and the next chunk is read with it: so what was thought reaches everything after it."
    shown = [column.chunk for column in columns if column.chunk is not None]
    left_out = sorted(set(range(len(trace.chunks))) - set(shown))
    return f"{text}   Chunks {left_out[0]} to {left_out[-1]} are left out." if left_out else text


def _layers(first: int, last: int) -> str:
    if last < first:
        return "embeddings"
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def draw_said(axes: Axes, middle: float, bottom: float, chips: Sequence[Chip], *, faint: bool = False) -> float:
    """Draws generated tokens in a box that stands on `bottom`, a narrow one if `faint`; returns its upper edge."""
    lines = chip_lines(chips)
    top = bottom - (len(lines) * CHIP_LINE + 0.1)
    width = INNER * 0.62 if faint else INNER
    box(axes, Rect(middle - width / 2, top, width, bottom - top), "white", faint=faint)
    draw_chips(axes, middle, top + 0.05, lines)
    return top


def chip_lines(chips: Sequence[Chip], width: float = INNER - 0.1) -> list[list[Chip]]:
    """Cuts `chips` into lines of at most `width` inches, with their texts as they are printed."""
    lines: list[list[Chip]] = [[]]
    for chip in chips:
        chip = chip._replace(text=printable(chip.text, TOKEN_CHARS))
        if lines[-1] and line_width([*lines[-1], chip]) > width:
            lines.append([])
        lines[-1].append(chip)
    return lines


def line_width(line: Sequence[Chip]) -> float:
    """Returns the inches that a line of chips takes."""
    return sum(len(chip.text) * CHIP_CHAR + CHIP_PAD for chip in line) + CHIP_GAP * (len(line) - 1)


def draw_chips(axes: Axes, middle: float, top: float, lines: Sequence[Sequence[Chip]]) -> None:
    """Draws lines of chips, each centred."""
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
    return chip_lines([*tokens, *follow])


def answer_chips(trace: ThoughtTrace) -> list[Chip]:
    """The tokens of the answer, cut if it is long; the end sign if it is empty."""
    return first_chips([Chip(text, BLUE) for text in trace.answer], MAX_SAID) or [Chip(END)]


def thought_chips(thought: ThoughtText) -> list[Chip]:
    """A thought's tokens and its end; a long one is cut."""
    end = [Chip(END, "white", thought.trivial)] if thought.ended else []
    return [*first_chips([Chip(text, BLUE) for text in thought.tokens], MAX_SAID), *end]


def first_chips(chips: Sequence[Chip], most: int) -> list[Chip]:
    """Returns all of `chips`, or the first ones and a sign that there are more."""
    return list(chips) if len(chips) <= most else [*chips[: most - 1], Chip("…", chips[-1].colour)]
