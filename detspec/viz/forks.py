"""Draws texts of two runs as rows: the tokens that both have, and those after the fork, where the runs go on differently."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from detspec.viz.colours import CHANGED, SAME

GAP = 0.22  # of a row, between two rows
MOST_BARS = 100

Row = tuple[int, int | None]  # tokens of a text, and the first that differs; None if none does


def draw_forks(axes: Axes, rows: Sequence[Row], *, same: str = SAME, changed: str = CHANGED) -> None:
    """Draws a thin bar for each of `rows`, over tokens: what both runs have in `same`, what follows the fork in `changed`.

    Texts that fork come first, the earliest fork at the top.
    """
    ordered = sorted(rows, key=lambda row: (row[1] is None, row[1]))
    places = range(len(ordered))
    forks = [length if fork is None else fork for length, fork in ordered]
    ends = [length for length, _ in ordered]
    if len(rows) <= MOST_BARS:
        rest = [end - fork for end, fork in zip(ends, forks, strict=True)]
        axes.barh(places, forks, 1 - GAP, color=same, linewidth=0)
        axes.barh(places, rest, 1 - GAP, left=forks, color=changed, linewidth=0)
    else:  # as two areas: gaps would be narrower than a pixel
        edges = [place - 0.5 for place in range(len(rows) + 1)]
        axes.stairs(forks, edges, orientation="horizontal", fill=True, color=same)
        axes.stairs(ends, edges, baseline=forks, orientation="horizontal", fill=True, color=changed)
    axes.set(ylim=(len(ordered) - 0.5, -0.5), xlim=(0, max((length for length, _ in rows), default=1)), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


def num_forked(rows: Sequence[Row]) -> int:
    """Counts the texts that fork."""
    return sum(fork is not None for _, fork in rows)
