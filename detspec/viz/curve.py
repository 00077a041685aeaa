"""Draws measured figures as curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from detspec.viz.saving import matplotlib_needed

COLOURS = ("#1b6ca8", "#d1495b", "#7a7a7a", "#2e8b57", "#8e5ea2", "#c98a00")


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
