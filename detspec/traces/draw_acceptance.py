"""Draws the acceptance of drafts over window and temperature as a heat map."""

import numpy as np
from matplotlib.figure import Figure

from detspec.errors import InputError
from detspec.traces.acceptance import AcceptanceTable, percent
from detspec.traces.record_windows import NAMES
from detspec.viz.colours import INK

CELL = (0.82, 0.56)  # inches
MARGIN = (0.9, 1.5)
LEAST_WIDTH = 3.8  # room for the title
COLOURS = "Blues"
DARK = 0.65  # a share whose cell is dark: writing on it is white


def acceptance_figure(*tables: AcceptanceTable) -> Figure:
    """Draws a heat map for each table, side by side: the share of accepted drafts, and below it the tokens a pass.

    Raises `InputError` if matplotlib is missing or there is no table.
    """
    if not tables:
        raise InputError("acceptance_figure needs at least one result of measure_acceptance")
    columns = [len(table.windows) for table in tables]
    rows = max(len(table.temperatures) for table in tables)
    width = max(sum(CELL[0] * number + MARGIN[0] for number in columns), LEAST_WIDTH)
    figure = Figure(figsize=(width, CELL[1] * rows + MARGIN[1]), facecolor="white", layout="constrained")
    for axes, table in zip(figure.subplots(1, len(tables), width_ratios=columns, squeeze=False)[0], tables, strict=True):
        shares = [[np.nan if cell.rate is None else cell.rate for cell in row] for row in table.cells]
        axes.imshow(np.asarray(shares), cmap=COLOURS, vmin=0, vmax=1.15, aspect="auto")
        for y, row in enumerate(table.cells):
            for x, cell in enumerate(row):
                ink = "white" if (cell.rate or 0) > DARK else INK
                axes.text(x, y - 0.14, percent(cell), ha="center", va="center", color=ink, size=12, weight="bold")
                axes.text(x, y + 0.24, f"{cell.tokens_a_pass:.1f} tokens", ha="center", va="center", color=ink, size=9)
        axes.set_xticks(range(len(table.windows)), [str(window) for window in table.windows])
        axes.set_yticks(range(len(table.temperatures)), [f"{temperature:g}" for temperature in table.temperatures])
        axes.set_xlabel("window (draft and one more token)")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"drafts by {NAMES.get(table.drafter, table.drafter)}", loc="left", size=11)
    figure.suptitle("Accepted drafts, and tokens a pass", size=12, weight="bold")
    figure.axes[0].set_ylabel("temperature")
    return figure
