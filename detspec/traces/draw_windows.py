"""Draws windows of a trace, a column per stage and a line per token, and saves the picture; in inches, y downwards."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from detspec.errors import InputError
from detspec.traces.windows import Trace, TraceWindow, default_windows
from detspec.viz.colours import BLUE, FAINT, GREEN, GREY, MARK_COLOURS, RED, YELLOW
from detspec.viz.figures import save_figure
from detspec.viz.shapes import Rect, arrow, block, canvas, cylinder, draw_legend, label, printable, subscript, with_gaps

COLUMN = 2.25
GAP = 0.8
MARGIN = 0.4
LINE = 0.31
# its rim below a window's top, its blue and its coloured part
CYLINDER_TOP = 0.74
CYLINDER_BODY = 0.5
CYLINDER_WINDOW = 0.72
TOKEN_CHARS = 11
MAX_LINES = 18  # a longer window leaves out runs of tokens


class Cell(NamedTuple):
    """A token in a column: the look of its block, and the mark next to it."""

    colour: str
    name: str
    token: str
    hatched: bool = False
    mark: str = ""


MEANINGS = (
    (BLUE, "committed before", False),
    (YELLOW, "drafted", False),
    (GREEN, "accepted", False),
    (RED, "rejected", False),
    (GREEN, "bonus or correction: chosen by verify", True),
    (GREY, "other requests", False),
)


def save_trace(trace: Trace, path: str | Path, windows: Sequence[int] | None = None) -> list[Path]:
    """Writes `trace_figure` as `path.svg` (the same bytes for the same trace) and `path.png`; returns both paths.

    Needs no display.
    """
    return save_figure(trace_figure(trace, windows), path)


def trace_figure(trace: Trace, windows: Sequence[int] | None = None) -> Figure:
    """Draws the windows with the indices `windows` below each other, with the trace's title and a legend.

    The default is the first window in which all drafted tokens were accepted, and the first with a rollback.

    Raises `InputError` if there is no such window.
    """
    windows = default_windows(trace) if windows is None else windows
    if not windows:
        raise InputError("the trace has no window to draw")
    if missing := [index for index in windows if not 0 <= index < len(trace.windows)]:
        raise InputError(f"the trace has windows 0 to {len(trace.windows) - 1}, asked for {missing[0]}")
    heights = [window_height(trace.windows[index]) for index in windows]
    figure, axes = canvas(2 * MARGIN + 4 * COLUMN + 3 * GAP, 0.6 + sum(heights) + 0.5)
    label(axes, MARGIN, 0.33, trace.title, size=min(11.0, 1375.0 / max(len(trace.title), 1)), ha="left", weight="bold")
    top = 0.6
    for index, height in zip(windows, heights, strict=True):
        draw_window(axes, trace, index, top)
        top += height
    draw_legend(axes, MARGIN, top + 0.1, MEANINGS)
    return figure


def shown_tokens(window: TraceWindow) -> list[int | None]:
    """Chooses which of T0 ... T_W get a line; None stands for a run left out.

    A long window keeps its beginning, its end and the tokens around its last accepted one.
    """
    last = len(window.targets)
    if last < MAX_LINES:
        return list(range(last + 1))
    near = range(window.accepted - 3, window.accepted + 4)
    return with_gaps(sorted(i for i in {*range(5), *near, last - 2, last - 1, last} if 0 <= i <= last))


def window_height(window: TraceWindow) -> float:
    """Returns the height that `draw_window` takes."""
    return CYLINDER_TOP + CYLINDER_BODY + CYLINDER_WINDOW + 0.75 + LINE * max(len(shown_tokens(window)) + 0.4, 4.4) + 0.85


def draw_window(axes: Axes, trace: Trace, index: int, top: float) -> None:
    """Draws a window from `top` down: stage names, caches, tokens and a caption."""
    window = trace.windows[index]
    columns = [MARGIN + i * (COLUMN + GAP) for i in range(4)]
    stages = ["Prefill" if index == 0 else f"Prefill and {_count(index, 'window')}", "Decode", "Verify", _outcome(window)]
    remarks = [
        "the prompt's K/V but for its last token T₀" if index == 0 else "what is final so far",
        "cheap steps draft ahead",
        "one pass of a fixed shape over T₀ and the drafts",
        "a draft differs: the cache is cut" if window.rolled_back else "every draft agrees",
    ]
    for x, stage, remark in zip(columns, stages, remarks, strict=True):
        label(axes, x + COLUMN / 2, top + 0.22, stage, size=13.0, weight="bold")
        label(axes, x + COLUMN / 2, top + 0.46, remark, size=8.0, color=FAINT)
    draw_caches(axes, window, index, columns, top + CYLINDER_TOP)
    tokens_top = top + CYLINDER_TOP + CYLINDER_BODY + CYLINDER_WINDOW + 0.75
    draw_request(axes, trace, index, columns[0], tokens_top)
    draw_tokens(axes, window, columns, tokens_top)
    draw_others(axes, trace.num_others, columns[1], tokens_top + (len(shown_tokens(window)) - 0.9) * LINE)
    bottom = top + window_height(window) - 0.5
    for y, text, weight in zip((bottom, bottom + 0.22), _captions(window), ("bold", "normal"), strict=True):
        label(axes, columns[3] + COLUMN, y, text, size=10.0, ha="right", weight=weight)


def draw_caches(axes: Axes, window: TraceWindow, index: int, columns: Sequence[float], top: float) -> None:
    """Draws four cylinders: blue is the cache before the window, each slice below is one slot that the window wrote."""
    kept = window.length_after - window.length_before
    rejected = window.length_verified - window.length_after
    drafted = window.length_drafted - window.length_before
    runs: tuple[list[tuple[str, int]], ...] = ([], [(YELLOW, drafted)], [(GREEN, kept), (RED, rejected)], [(GREEN, kept)])
    slot = min(CYLINDER_WINDOW / (len(window.drafted) + 1), 0.14)
    names = (
        "KV cache after prefill" if index == 0 else f"KV cache after {_count(index, 'window')}",
        "KV cache after decode",
        "KV cache after verify",
        "KV cache after verify-rollback" if window.rolled_back else "KV cache after accepting",
    )
    lengths = (window.length_before, window.length_drafted, window.length_verified, window.length_after)
    for i, x in enumerate(columns):
        middle = x + COLUMN / 2
        cylinder(axes, middle, top, 1.1, [(BLUE, CYLINDER_BODY), *slices(runs[i], slot)])
        label(axes, middle, top + CYLINDER_BODY + CYLINDER_WINDOW + 0.26, names[i])
        label(axes, middle, top + CYLINDER_BODY + CYLINDER_WINDOW + 0.45, f"{lengths[i]} slots", color=FAINT)
        if i:
            arrow(axes, (x - GAP - 0.35, top + 0.35), (x + 0.35, top + 0.35), strong=True)


def slices(runs: Sequence[tuple[str, int]], slot: float) -> list[tuple[str, float]]:
    """Returns runs of `(colour, slots)` as parts of a cylinder: a part per slot, or per run where slots get too thin."""
    if slot < 0.04:
        return [(colour, number * slot) for colour, number in runs if number]
    return [(colour, slot) for colour, number in runs for _ in range(number)]


def draw_request(axes: Axes, trace: Trace, index: int, x: float, top: float) -> None:
    """Draws the first column: the sequence so far, T0 at its end, and the requests that share the batch."""
    window = trace.windows[index]
    before = [*trace.prompt, trace.windows[0].last_token, *(token for w in trace.windows[:index] for token in w.committed)]
    tail = printable("".join(before[: window.start]), TOKEN_CHARS, tail=True)
    block(axes, Rect(x, top, COLUMN, LINE), BLUE, "prompt" if index == 0 else "so far", tail)
    block(axes, Rect(x, top + LINE, COLUMN, LINE), BLUE, "T₀", printable(window.last_token, TOKEN_CHARS))
    own = f"deterministic request: {_count(window.start, 'token')} and T₀"
    label(axes, x + 0.05, top + 2.35 * LINE, own, size=8.0, ha="left")
    draw_others(axes, trace.num_others, x, top + 3 * LINE)


def draw_others(axes: Axes, num_others: int, x: float, y: float) -> None:
    """Draws grey blocks for the other requests of the batch, four at most, and their number."""
    if num_others:
        for i in range(min(num_others, 4)):
            block(axes, Rect(x + i * COLUMN / 4, y, COLUMN / 4, 0.7 * LINE), GREY, "")
        label(axes, x + 0.05, y + LINE, f"other requests: {num_others}", size=8.0, ha="left")


def draw_tokens(axes: Axes, window: TraceWindow, columns: Sequence[float], top: float) -> None:
    """Draws the token columns under decode, verify and the outcome, a line per token."""
    arrow(axes, (columns[0] + COLUMN, top + 1.5 * LINE), (columns[1] - 0.3, top + LINE / 2))
    label(axes, columns[1] - 0.05, top - 0.1, "position", size=7.0, ha="right", color=FAINT)
    lines = shown_tokens(window)
    for line, i in enumerate(lines):
        y = top + line * LINE
        middle = y + LINE / 2
        if i is None:
            for x, cell in zip(columns[1:], cells(window, lines[line + 1]), strict=True):
                label(axes, x + COLUMN / 2, middle, "⋮" if cell else "", size=12.0)
            continue
        drafted, verified, outcome = cells(window, i)
        for x, cell in zip(columns[1:], (drafted, verified, outcome), strict=True):
            if cell:
                text = printable(cell.token, TOKEN_CHARS)
                block(axes, Rect(x, y, COLUMN, LINE), cell.colour, cell.name, text, hatched=cell.hatched)
                label(axes, x - 0.05, middle, str(window.start + i), size=7.0, ha="right", color=FAINT)
        if verified and verified.mark:
            colour = MARK_COLOURS[verified.mark]
            label(axes, columns[2] + COLUMN + 0.12, middle, verified.mark, size=12.0, color=colour, weight="bold")
        if drafted:
            arrow(axes, (columns[1] + COLUMN, middle), (columns[2] - 0.3, middle))
        if outcome:
            arrow(axes, (columns[2] + COLUMN + 0.25, middle), (columns[3] - 0.3, middle))


def cells(window: TraceWindow, i: int | None) -> tuple[Cell | None, Cell | None, Cell | None]:
    """Returns T_i as it stands in the columns of decode, verify and the outcome."""
    if not i:
        opening = Cell(BLUE, subscript("T", 0), window.last_token)
        return opening, opening, opening
    name = subscript("T", i)
    target = window.targets[i - 1]
    drafted = Cell(YELLOW, f"{name}'", window.drafted[i - 1]) if i <= len(window.drafted) else None
    own = i == window.accepted + 1  # the correction or the bonus: verify's own choice
    if i <= window.accepted:
        verified = Cell(GREEN, f"{name} (={name}')", target, mark="✓")
    elif window.rolled_back:
        verified = Cell(RED, f"{name} (≠{name}')" if own else name, target, mark="✗")
    else:
        verified = Cell(GREEN, name, target, hatched=True)
    outcome = Cell(GREEN, name, window.committed[i - 1], hatched=own) if i <= len(window.committed) else None
    return drafted, verified, outcome


def _outcome(window: TraceWindow) -> str:
    return "Rollback" if window.rolled_back else "No Rollback"


def _captions(window: TraceWindow) -> tuple[str, str]:
    """Says the outcome in a sentence, and the fate of the last token."""
    last = subscript("T", len(window.committed))
    accepted = subscript("T", window.accepted)
    if len(window.committed) <= window.accepted:
        return f"{_outcome(window)}: the text ends with {last}", "everything after it is void"
    if window.rolled_back:
        return (
            f"Rollback: sequence and KV cache restored until the last accepted token {accepted} "
            f"(length {window.length_verified} → {window.length_after})",
            f"verify's own {last} is committed in place of {last}' and opens the next window",
        )
    return (
        f"No Rollback: sequence and KV after accepting all tokens (including {last})",
        f"{last} costs nothing extra: verify chose it after {accepted}; it opens the next window",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
