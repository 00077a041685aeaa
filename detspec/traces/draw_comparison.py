"""Draws a comparison of two outputs: where texts fork, and how far log-probabilities are apart."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from detspec.errors import InputError
from detspec.jobs.comparison import Comparison
from detspec.viz.colours import CHANGED, RULE, SAME
from detspec.viz.forks import Row, draw_forks, num_forked

WIDTH = 7.0  # inches
ROW = 0.07  # inches of a text
LEAST_ROWS = 1.0
MOST_ROWS = 4.0
DIFFERENCES = 2.4
REST = 1.5  # titles, labels
MOST_POINTS = 20_000


def comparison_figure(comparison: Comparison) -> Figure:
    """Draws a row for each text, and below it the |difference| of log-probabilities, both over new tokens.

    The scale of differences is logarithmic, with a line of its own for 0, the same bits. Of more than 20,000 log-probabilities
    it draws evenly chosen ones, and always the largest difference at each token.

    Raises `InputError` if matplotlib is missing, or the two outputs have no request in common.
    """
    if not comparison.texts:
        raise InputError("the two outputs have no request in common: there is nothing to draw")
    rows: list[Row] = [(max(text.num_tokens), None if text.fork is None else text.fork.place) for text in comparison.texts]
    height = min(max(ROW * len(rows), LEAST_ROWS), MOST_ROWS)
    figure = Figure(figsize=(WIDTH, height + DIFFERENCES + REST), facecolor="white", layout="constrained")
    forks, differences = figure.subplots(2, 1, sharex=True, height_ratios=(height, DIFFERENCES))
    draw_forks(forks, rows)
    _titled(forks, f"{num_forked(rows):,} of {len(rows):,} texts fork", "same tokens", "after the fork")
    forks.set_ylabel("texts")
    draw_differences(differences, comparison)
    differences.set_xlabel("new token, from 0")
    return figure


def draw_differences(axes: Axes, comparison: Comparison) -> None:
    """Draws a point for each log-probability before the forks: the same bits in one colour, other bits in another."""
    places = np.concatenate([np.arange(text.differences.size) for text in comparison.texts])
    values = np.concatenate([text.differences for text in comparison.texts])
    numbers = values[np.isfinite(values) & (values > 0)]
    least, most = (10.0 ** np.floor(np.log10(numbers.min())), numbers.max()) if numbers.size else (1e-8, 1e-1)
    top = most if np.isfinite(values).all() else 10 * most  # where what is no number stands
    axes.set_yscale("symlog", linthresh=least, linscale=0.5)
    differs = np.concatenate([text.differs for text in comparison.texts])
    kept = kept_points(places, values)
    for is_other, colour in ((False, SAME), (True, CHANGED)):
        mine = kept[differs[kept] == is_other]
        axes.scatter(places[mine], np.minimum(values[mine], top), 5, color=colour, alpha=0.6, linewidth=0)
    axes.set(ylabel="|difference| of\nlog-probabilities (nats)", ylim=(-0.3 * least, 2 * top))
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    found = f"{comparison.num_logprobs_differ:,} of {comparison.num_logprobs:,} log-probabilities differ"
    _titled(axes, found, "same bits", "other bits")


def kept_points(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Indices of the points that are drawn: at most `MOST_POINTS` at even distances, and the largest value of each place."""
    order = np.lexsort((values, places))
    largest = order[np.flatnonzero(np.diff(places[order], append=-1))]
    return np.unique(np.concatenate([largest, np.arange(0, len(values), -(-len(values) // MOST_POINTS) or 1)]))


def _titled(axes: Axes, finding: str, same: str, changed: str) -> None:
    """Writes the finding above the axes, and on the right what the two colours mean."""
    axes.set_title(finding, loc="left", size=11, weight="bold")
    samples = [Patch(color=SAME, label=same), Patch(color=CHANGED, label=changed)]
    axes.legend(
        handles=samples,
        loc="lower right",
        bbox_to_anchor=(1.01, 0.985),
        ncols=2,
        frameon=False,
        fontsize=9.5,
        handlelength=0.9,
        columnspacing=1.0,
        handletextpad=0.4,
        borderpad=0,
    )
