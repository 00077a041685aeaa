"""Parts of pictures: boxes, tokens as blocks and chips, KV caches as cylinders, arrows, labels; in inches, y downwards."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Circle, Ellipse, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

from detspec.viz.colours import FAINT, HATCH_INK, INK

HATCH = "xxxx"
# matplotlib brings both along
SANS = "DejaVu Sans"
MONO = "DejaVu Sans Mono"

ESCAPES = {"\n": "⏎", " ": "·", "\t": "\\t", "\r": "\\r"}
Point = tuple[float, float]


class Rect(NamedTuple):
    """A place in a picture: upper left corner, width and height in inches."""

    x: float
    y: float
    width: float
    height: float


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Makes an empty figure of `width` by `height` inches; its one axes counts inches from the upper left corner."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0.0, width), ylim=(height, 0.0))
    axes.set_axis_off()
    return figure, axes


def label(axes: Axes, x: float, y: float, text: str, *, size: float = 9.0, mono: bool = False, **style: Any) -> None:
    """Writes `text` at `(x, y)`, centred unless `ha` and `va` say otherwise; a `$` is a dollar sign."""
    style = {"ha": "center", "va": "center", "color": INK} | style
    axes.text(x, y, text, family=MONO if mono else SANS, size=size, parse_math=False, **style)


def remarks(axes: Axes, x: float, y: float, lines: Sequence[str], *, step: float = 0.15, size: float = 7.0) -> None:
    """Writes faint lines of text to the right of `x`, the first at `y`."""
    for i, line in enumerate(lines):
        label(axes, x, y + step * i, line, size=size, ha="left", color=FAINT)


def box(axes: Axes, at: Rect, colour: str, *, faint: bool = False, hatched: bool = False, rounding: float = 0.06) -> None:
    """Draws a rounded box; a faint one has a dashed grey edge."""
    axes.add_patch(
        FancyBboxPatch(
            (at.x, at.y),
            at.width,
            at.height,
            boxstyle=f"round,pad=0,rounding_size={rounding}",
            facecolor=colour,
            edgecolor=HATCH_INK if hatched else FAINT if faint else INK,
            linewidth=0.7 if faint else 0.9,
            linestyle=(0, (3, 2)) if faint else "-",
            hatch=HATCH if hatched else None,
        )
    )


def block(axes: Axes, at: Rect, colour: str, symbol: str, token: str = "", *, hatched: bool = False, size: float = 9.0) -> None:
    """Draws a rounded box, a little smaller than `at`: `symbol` on the left, the token's text on the right."""
    box(axes, Rect(at.x + 0.01, at.y + 0.01, at.width - 0.02, at.height - 0.02), colour, hatched=hatched)
    backing = {"facecolor": colour, "edgecolor": "none", "pad": 1.2} if hatched else None
    middle = at.y + at.height / 2
    label(axes, at.x + 0.12, middle, symbol, size=size, ha="left", weight="bold", bbox=backing)
    if token:
        label(axes, at.x + at.width - 0.12, middle, token, size=size, ha="right", mono=True, bbox=backing)


def cylinder(axes: Axes, x: float, y: float, width: float, parts: Sequence[tuple[str, float]]) -> None:
    """Draws a standing cylinder with its upper rim centred at `(x, y)`; `parts` are `(colour, height)` from top to bottom.

    The lowest part is drawn first. Each has a bulging lower edge, so an upper part overlaps the one below it.
    """
    half = width / 2
    rim = 0.09
    angle = np.linspace(0.0, np.pi, 40)
    bottom = y + sum(height for _, height in parts)
    for colour, height in reversed(parts):
        bulge = np.stack([x + half * np.cos(angle), bottom + rim * np.sin(angle)], axis=-1)
        outline = np.concatenate([[[x - half, bottom - height], [x + half, bottom - height]], bulge])
        axes.add_patch(Polygon(outline, facecolor=colour, edgecolor=INK, linewidth=0.8))
        bottom -= height
    axes.add_patch(Ellipse((x, y), width, 2 * rim, facecolor="white", edgecolor=INK, linewidth=0.8))


def arrow(axes: Axes, start: Point, end: Point, *, strong: bool = False, colour: str = FAINT) -> None:
    """Draws an arrow from `start` to `end`; a strong one connects stages, a faint one tokens."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="simple,head_length=9,head_width=11,tail_width=4" if strong else "->,head_length=3,head_width=2",
            color=INK if strong else colour,
            linewidth=0 if strong else 0.9,
            shrinkA=0,
            shrinkB=0,
        )
    )


def elbow(axes: Axes, points: Sequence[Point], *, faint: bool) -> None:
    """Draws a line along `points`; its last piece is an arrow."""
    colour = FAINT if faint else INK
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color=colour, linewidth=0.8 if faint else 1.1, linestyle=(0, (3, 2)) if faint else "-")
    arrow(axes, points[-2], points[-1], colour=colour)


def plus(axes: Axes, x: float, y: float, *, faint: bool) -> None:
    """Draws the sign of a sum."""
    colour = FAINT if faint else INK
    axes.add_patch(Circle((x, y), 0.09, facecolor="white", edgecolor=colour, linewidth=0.9))
    axes.plot([x - 0.05, x + 0.05], [y, y], color=colour, linewidth=0.9)
    axes.plot([x, x], [y - 0.05, y + 0.05], color=colour, linewidth=0.9)


def printable(text: str, max_chars: int, *, tail: bool = False) -> str:
    """Writes `text` on one line in characters of the font: `"\\n x"` gives `"⏎·x"`.

    A long text keeps its beginning, or its `tail`.
    """
    charmap = get_font(findfont(MONO)).get_charmap()
    shown = "".join(ESCAPES.get(c, c if c.isprintable() and ord(c) in charmap else f"\\u{ord(c):04x}") for c in text)
    if len(shown) <= max_chars:
        return shown
    return "…" + shown[1 - max_chars :] if tail else shown[: max_chars - 1] + "…"


def shown_places(number: int, most: int) -> list[int | None]:
    """Chooses which of `number` things are drawn: all, or the first and the last with None between for those left out.

    12 things, at most 7: 0 1 2 3 None 10 11
    """
    if number <= most:
        return list(range(number))
    tail = most // 3
    return [*range(most - 1 - tail), None, *range(number - tail, number)]


def subscript(name: str, number: int) -> str:
    """Returns `name` with `number` as a subscript."""
    return name + str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def draw_legend(axes: Axes, x: float, top: float, entries: Sequence[tuple[str, str, bool]]) -> None:
    """Draws a line of `(colour, meaning, hatched)` entries, from `x` on, each with a small sample of a block."""
    for colour, meaning, hatched in entries:
        look: dict[str, Any] = {"edgecolor": HATCH_INK if hatched else INK, "hatch": HATCH if hatched else None}
        axes.add_patch(Rectangle((x, top), 0.28, 0.18, facecolor=colour, linewidth=0.8, **look))
        label(axes, x + 0.36, top + 0.09, meaning, size=8.5, ha="left")
        x += 0.72 + 0.066 * len(meaning)


def with_gaps(kept: Sequence[int]) -> list[int | None]:
    """Puts None where some of rising indices are left out: 0 1 5 6 gives 0 1 None 5 6."""
    lines: list[int | None] = []
    for previous, index in zip([-1, *kept], kept, strict=False):
        lines += [index] if index == previous + 1 else [None, index]
    return lines
