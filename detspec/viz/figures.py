"""Draws curves, saves pictures as files, and reports a missing matplotlib."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from detspec.errors import InputError
from detspec.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#d1495b", "#7a7a7a", "#2e8b57", "#8e5ea2", "#c98a00")


def save_figure(figure: "Figure", path: str | Path) -> list[Path]:
    """Writes `path.svg` (equal figures give equal bytes) and `path.png` without a display. Returns the two paths."""
    import matplotlib

    written = [Path(f"{path}.svg"), Path(f"{path}.png")]
    written[0].parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "detspec", "svg.fonttype": "path"}):
        figure.savefig(written[0], metadata={"Date": None})
        figure.savefig(written[1], dpi=150)
    return written


@contextlib.contextmanager
def matplotlib_needed() -> Iterator[None]:
    """Wrap imports of matplotlib in this: if it is missing, raises `InputError` with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise InputError(f"pictures need matplotlib: {install_command('plots')}") from error


def draw_curves(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marked_x: float | None = None,
) -> None:
    """Writes a PNG with one line for each of `curves`, whose values lie in 0 .. 1; `marked_x` draws a vertical line.

    Raises `InputError` if matplotlib is missing.
    """
    with matplotlib_needed():
        from matplotlib.figure import Figure
    figure = Figure(figsize=(8.0, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", markersize=3.5, linewidth=1.6, color=colour, label=name)
    if marked_x is not None:
        axes.axvline(marked_x, color="#bbbbbb", linewidth=1, linestyle="--")
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(-0.03, 1.03))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)
