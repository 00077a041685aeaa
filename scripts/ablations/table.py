"""Common parts of all ablations: options, one format of tables, and a picture.

A row has named columns, the same in every row: first settings, then what was found. A value is a string, a number, a bool or a
`Spread`, which is a median with quartiles, and takes three columns of the CSV:

    | window | speed          | moved % |            window,speed,speed_low,speed_high,moved %
    | ------ | -------------- | ------- |            4,1.31,1.2,1.4,0.0
    | 4      | 1.31 (1.2-1.4) | 0       |
"""

import argparse
import csv
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detspec.compile_cache import enable_jax_cache
from detspec.viz.figures import COLOURS, matplotlib_needed

Row = Mapping[str, Any]


class Spread(NamedTuple):
    """A figure that was found several times."""

    median: float
    low: float  # first quartile
    high: float  # third quartile

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        """Median and quartiles of `values`."""
        low, median, high = np.quantile(list(values), (0.25, 0.5, 0.75)).tolist()
        return Spread(median, low, high)


class Options(NamedTuple):
    """Options of the command line."""

    out: Path
    size: str  # "tiny" or "full"
    seed: int


class Plot(NamedTuple):
    """A picture: a panel for each column of `y` over the values of column `x`, a line for each value of column `lines`."""

    x: str
    lines: str
    y: tuple[str, ...]


class Promise(NamedTuple):
    """Rows must have 0 in `column`, but for those where `is_control` holds: of them, at least one must have more."""

    column: str
    is_control: Callable[[Row], bool]

    def broken(self, rows: Sequence[Row]) -> str:
        """Names the broken promises, in words; "" if there are none."""
        moved = [str(dict(row)) for row in rows if row[self.column] and not self.is_control(row)]
        if moved:
            return f"{self.column} must be 0 in {moved[0]}"
        if not any(row[self.column] for row in rows if self.is_control(row)):
            return f"{self.column} is 0 in every control, so the comparison has no power here"
        return ""


def carry_out(
    name: str,
    measure: Callable[[Options], list[Row]],
    doc: str,
    argv: Sequence[str] | None,
    *,
    plot: Plot,
    promise: Promise,
    also: Promise | None = None,
) -> int:
    """The command of an ablation: reads the options, measures, prints the rows, writes `name.csv` and `name.png`.

    Returns the exit code: 1, with a message, if bits are not as promised.
    """
    options = parse(doc, argv)
    enable_jax_cache()
    rows = measure(options)
    print(text_of(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(options.out / f"{name}.csv", rows)
    draw(options.out / f"{name}.png", rows, plot)
    broken = "; ".join(filter(None, (each.broken(rows) for each in (promise, also) if each)))
    print(f"\nbits: {broken or 'as promised, and the control differs'}\nwritten: {options.out / name}.csv and .png")
    return int(bool(broken))


def parse(doc: str, argv: Sequence[str] | None) -> Options:
    """The options of an ablation whose docstring is `doc`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/ablations"), metavar="DIR", help="folder for CSV and picture")
    sizes = 'a random model and few settings, or the shipped model and all settings (default: "full")'
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help=sizes)
    parser.add_argument("--seed", type=int, default=0, help="first seed of sampling and training, at least 0 (default: 0)")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed must be at least 0, got {args.seed}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error('ablations draw a picture, which needs matplotlib: pip install ".[plots]"')
    return Options(args.out, args.size, args.seed)


def text_of(rows: Sequence[Row]) -> str:
    """An aligned table that is Markdown, too."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True))} |" for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    figure = value.median if isinstance(value, Spread) else value
    if isinstance(figure, float) and math.isnan(figure):
        return "-"
    if isinstance(value, Spread):
        return f"{value.median:.3g} ({value.low:.3g}-{value.high:.3g})"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All digits of `rows`; a `Spread` fills the columns `name`, `name_low` and `name_high`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for line in [{name: _names(name, value) for name, value in rows[0].items()}, *rows]:
            values = (value if isinstance(value, tuple) else (value,) for value in line.values())
            writer.writerow(itertools.chain.from_iterable(values))


def _names(column: str, value: Any) -> tuple[str, ...]:
    return (column, f"{column}_low", f"{column}_high") if isinstance(value, Spread) else (column,)


def draw(path: Path, rows: Sequence[Row], plot: Plot) -> None:
    """Writes `plot` as a PNG: values of `plot.x` evenly spaced, whiskers from the first to the third quartile."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    figure = Figure(figsize=(1.8 + 3.0 * len(plot.y), 3.0), dpi=90, layout="constrained")
    values = dict.fromkeys(row[plot.x] for row in rows)
    places = {value: i for i, value in enumerate(sorted(values) if all(isinstance(v, int) for v in values) else values)}
    names = list(dict.fromkeys(row[plot.lines] for row in rows))
    for axes, column in zip(figure.subplots(1, len(plot.y), squeeze=False)[0], plot.y, strict=True):
        for number, name in enumerate(names):
            own = sorted((row for row in rows if row[plot.lines] == name), key=lambda row: places[row[plot.x]])
            round_of_colours, colour = divmod(number, len(COLOURS))
            look: dict[str, Any] = {"color": COLOURS[colour], "linestyle": ("-", "--", ":")[round_of_colours % 3]}
            found = [v if isinstance(v, Spread) else Spread(v, v, v) for v in (row[column] for row in own)]
            whiskers = [[s.median - s.low for s in found], [s.high - s.median for s in found]]
            at = [places[row[plot.x]] + 0.06 * (number - (len(names) - 1) / 2) for row in own]  # no line hides another
            axes.errorbar(at, [s.median for s in found], whiskers, label=name, marker="o", markersize=3.5, **look)
        axes.set_xticks(range(len(places)), [str(value) for value in places])
        axes.set_xlabel(plot.x)
        axes.set_title(column, fontsize=10)
        axes.grid(alpha=0.25)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), title=plot.lines, loc="outside right upper", fontsize=8)
    figure.savefig(path)
