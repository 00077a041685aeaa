"""What pictures are made of: a token block, a KV cache as a cylinder, arrows, labels; in inches, y downwards."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

BLUE, YELLOW, GREEN, RED, GREY = "#9dc3f0", "#ffe08a", "#b9e6a5", "#f5b0a8", "#d3d3d3"
INK, FAINT = "#222222", "#777777"
HATCH, HATCH_INK = "xxxx", "#4d7f3c"
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"  # matplotlib brings both along

ESCAPES = {"\n": "⏎", " ": "·", "\t": "\\t", "\r": "\\r"}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of `width` by `height` inches whose one axes counts in inches from the upper left corner."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0.0, width), ylim=(height, 0.0))
    axes.set_axis_off()
    return figure, axes


def label(axes: Axes, x: float, y: float, text: str, *, size: float = 9.0, mono: bool = False, **style: Any) -> None:
    """`text` at `(x, y)`, centred unless `ha` and `va` say otherwise; a `$` is a dollar sign."""
    style = {"ha": "center", "va": "center", "color": INK} | style
    axes.text(x, y, text, family=MONO if mono else SANS, size=size, parse_math=False, **style)


def block(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    symbol: str,
    token: str = "",
    hatched: bool = False,
    size: float = 9.0,
) -> None:
    """A rounded box with its upper left corner at `(x, y)`: `symbol` on the left, the token's text on the right."""
    box = FancyBboxPatch(
        (x + 0.03, y + 0.03),
        width - 0.06,
        height - 0.06,
        boxstyle="round,pad=0.02,rounding_size=0.06",
        facecolor=colour,
        edgecolor=HATCH_INK if hatched else INK,
        linewidth=0.9,
        hatch=HATCH if hatched else None,
    )
    axes.add_patch(box)
    backing = {"facecolor": colour, "edgecolor": "none", "pad": 1.2} if hatched else None
    label(axes, x + 0.12, y + height / 2, symbol, size=size, ha="left", weight="bold", bbox=backing)
    if token:
        label(axes, x + width - 0.12, y + height / 2, token, size=size, ha="right", mono=True, bbox=backing)


def swatch(axes: Axes, x: float, y: float, colour: str, hatched: bool) -> None:
    """A small sample of a block's colour for a legend."""
    edge = HATCH_INK if hatched else INK
    axes.add_patch(
        Rectangle((x, y), 0.28, 0.18, facecolor=colour, edgecolor=edge, linewidth=0.8, hatch=HATCH if hatched else None)
    )


def cylinder(axes: Axes, x: float, y: float, width: float, parts: Sequence[tuple[str, float]]) -> None:
    """A standing cylinder, its upper rim centred at `(x, y)`, made of `(colour, height)` parts from top to bottom.

    Parts are drawn from the lowest up, each with a bulging lower edge, so that an upper part overlaps the one below it.
    """
    half, rim = width / 2, 0.09
    angle = np.linspace(0.0, np.pi, 40)
    bottom = y + sum(height for _, height in parts)
    for colour, height in reversed(parts):
        bulge = np.stack([x + half * np.cos(angle), bottom + rim * np.sin(angle)], axis=-1)
        outline = np.concatenate([[[x - half, bottom - height], [x + half, bottom - height]], bulge])
        axes.add_patch(Polygon(outline, facecolor=colour, edgecolor=INK, linewidth=0.8))
        bottom -= height
    axes.add_patch(Ellipse((x, y), width, 2 * rim, facecolor="white", edgecolor=INK, linewidth=0.8))


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, strong: bool = False, colour: str = FAINT
) -> None:
    """An arrow from `start` to `end`; a strong one leads from stage to stage, a faint one from token to token."""
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


def printable(text: str, max_chars: int, *, tail: bool = False) -> str:
    """`text` on one line in characters the font has: `"\\n x"` becomes `"⏎·x"`; if too long its beginning, or its `tail`."""
    charmap = get_font(findfont(MONO)).get_charmap()
    shown = "".join(ESCAPES.get(c, c if c.isprintable() and ord(c) in charmap else f"\\u{ord(c):04x}") for c in text)
    if len(shown) <= max_chars:
        return shown
    return "…" + shown[1 - max_chars :] if tail else shown[: max_chars - 1] + "…"


def draw_legend(axes: Axes, x: float, top: float, entries: Sequence[tuple[str, str, bool]]) -> None:
    """What the colours mean, in a line from `x` on: colour, meaning and whether it is hatched of each."""
    for colour, meaning, hatched in entries:
        swatch(axes, x, top, colour, hatched)
        label(axes, x + 0.36, top + 0.09, meaning, size=8.5, ha="left")
        x += 0.72 + 0.066 * len(meaning)
