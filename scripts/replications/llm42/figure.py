"""Nine panels in one figure: the paper in red, what was measured here in blue, predictions dashed."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detspec.viz.colours import FAINT, INK
from detspec.viz.figures import COLOURS, matplotlib_needed
from scripts.replications.llm42 import paper
from scripts.replications.llm42.headlines import PANELS, Found
from scripts.replications.llm42.one_request import BASE
from scripts.replications.llm42.spans import COMPILED, DETERMINISTIC, ORDINARY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, THEIRS, GREY, GREEN, PURPLE, OCHRE = COLOURS
PALE = {OURS: ("#b9d4e9", "#6fa6d0", OURS), THEIRS: ("#f0c4ca", "#e08a97", THEIRS)}  # at 10, 50 and 100 %
DEVICE_COLOURS = (GREEN, PURPLE, OCHRE)
SHARES = (10, 50, 100)
LINE = {"linewidth": 1.7, "marker": "o", "markersize": 4}


def draw(path: Path, found: dict[str, Any]) -> None:
    """Writes the figure as a PNG; panels without a result say so. Raises `InputError` if matplotlib is missing."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    figure = Figure(figsize=(19, 16), dpi=110, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.14, wspace=0.02, hspace=0.02)  # type: ignore[union-attr]
    mark = next(iter(found["results"].values()))["fingerprint"]
    figure.suptitle(
        f"LLM-42 in ratios: the paper (Llama 3.1 8B, H100) and detspec (random weights, {mark['device_kind']}, "
        f"{found['cores']} cores)\ndashed: predicted for Llama 3.1 8B, nothing was run",
        fontsize=14,
        color=INK,
    )
    all_axes = figure.subplots(3, 3).ravel()
    for number, (axes, panel, draw_panel) in enumerate(zip(all_axes, PANELS, DRAWN, strict=True), start=1):
        axes.set_title(f"{number}  {panel.title}", loc="left", fontsize=12.5, weight="bold", pad=40, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        if panel.run not in found["results"]:
            axes.text(0.5, 0.5, "not measured", ha="center", color=FAINT, transform=axes.transAxes)
            continue
        result = found["results"][panel.run]
        theirs, ours = panel.lines(result)
        for height, name, text, colour in ((1.075, "paper", theirs, THEIRS), (1.02, "here", ours, OURS)):
            axes.text(0, height, f"{name}: {text}", transform=axes.transAxes, fontsize=9, color=colour, parse_math=False)
        draw_panel(axes, result, found["predicted"])
    figure.savefig(path)


def draw_passes(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 1: each curve over its time at 16 rows."""

    def over_16(ms: dict[int, float]) -> tuple[list[int], list[float]]:
        return list(ms), [value / ms[16] for value in ms.values()]

    axes.plot(*over_16(paper.PASS_MS["8B"]), color=THEIRS, label="paper, 8B", **LINE)
    axes.plot(*over_16(paper.PASS_MS["70B"]), color=PALE[THEIRS][1], label="paper, 70B on 8", **LINE)
    axes.plot(*over_16({one["rows"]: one["ms"] for one in result["found"]}), color=OURS, label="here", **LINE)
    for (name, device), colour in zip(predicted.items(), DEVICE_COLOURS, strict=True):
        ms = {one["rows"]: one["ms"] for one in device["passes"]}
        axes.plot(*over_16(ms), color=colour, linestyle="--", linewidth=1.3, label=f"predicted, {name}")
    axes.set_yscale("log", base=2)
    _rows_axis(axes, (1, 4, 16, 64, 256, 1024))
    _plain_y(axes, "time / time of 16 rows")
    axes.legend(frameon=False, fontsize=8.5)


def draw_products(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 2."""
    for (name, ratios), colour in zip(paper.PRODUCTS.items(), (PALE[THEIRS][1], THEIRS), strict=True):
        axes.plot(paper.PRODUCT_ROWS, ratios, color=colour, label=f"paper, {name} / cuBLAS", **LINE)
    rows = [one["rows"] for one in result["found"]]
    for name, label, colour in (("kernel", "here, kernel / XLA", OURS), ("tiles", "here, tiles in XLA / XLA", PALE[OURS][1])):
        axes.plot(rows, [one["ratio"][name] for one in result["found"]], color=colour, label=label, **LINE)
    _one(axes)
    axes.set_yscale("log", base=2)
    _rows_axis(axes, (1, 8, 32, 128, 512, 2048))
    _plain_y(axes, "time / time of the library's product")
    axes.legend(frameon=False, fontsize=8.5)


def draw_one_request(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 3."""
    names = ("ordinary B", BASE, "batch-invariant", "one deterministic")
    labels = ("ordinary\nB", "ordinary\nB + 1", "all batch-\ninvariant", "one of B + 1\ndeterministic")
    ours = {name.removesuffix(", compiled"): one["ratio"] for name, one in result["found"].items()}
    for place, (version, colour) in enumerate((("arXiv", PALE[THEIRS][1]), ("SOSP", THEIRS))):
        theirs = paper.ONE_REQUEST[version]
        batch = {"arXiv": 10, "SOSP": 8}[version]
        heights = [theirs[name] / theirs[BASE] for name in names]
        _bars(axes, np.arange(4) + 0.27 * (place - 1), heights, 0.26, colour, f"paper, {version}, B = {batch}")
    heights = [ours.get(name, np.nan) for name in names]
    _bars(axes, np.arange(4) + 0.27, heights, 0.26, OURS, f"here, B = {result['settings']['batch']}")
    _one(axes)
    axes.set_xticks(range(4), labels)
    axes.set_ylim(0, 1.42)
    axes.set_ylabel("new tokens per second / ordinary B + 1")
    axes.legend(frameon=False, fontsize=8.5, ncols=3, loc="upper center")


def draw_spans(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 4: shares of requests that differ by each part of their length."""
    places = np.array([0, *paper.FIRST_DIFFERENCE]) / paper.SPANS_TOKENS
    axes.plot(places, [0, *paper.FIRST_DIFFERENCE.values()], color=THEIRS, label="paper, tokens", **LINE)
    new = result["settings"]["new"]
    lines = (
        (COMPILED, "token", PALE[OURS][1], "-", "here, ordinary, compiled products: tokens"),
        (ORDINARY, "token", GREY, "-", "here, ordinary: tokens"),
        (ORDINARY, "bits", GREY, ":", "here, ordinary: log-probability bits"),
        (DETERMINISTIC, "bits", OURS, "-", "here, deterministic: bits and tokens"),
    )
    for kind, what, colour, style, label in lines:
        each = result["found"][kind]
        differ = sorted(one[what] for one in each if one[what] is not None)
        xs = [0.0, *(first / new for first in differ), 1.0]
        ys = [0.0, *((i + 1) / len(each) for i in range(len(differ))), len(differ) / len(each)]
        axes.step(xs, ys, where="post", color=colour, linestyle=style, linewidth=2.4 if what == "bits" else 1.7, label=label)
    axes.set(xlabel=f"place in the text (1: token {new} here, {paper.SPANS_TOKENS} there)", ylim=(-0.03, 1.25))
    axes.set_ylabel("requests that differ by then")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper center")


def draw_recompute(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 5."""
    for name, colour in (("8B", THEIRS), ("70B", PALE[THEIRS][1])):
        shares = paper.RECOMPUTED[name]
        axes.plot(list(shares), [100 * share for share in shares.values()], color=colour, label=f"paper, {name}", **LINE)
    for method, colour in (("int8", PALE[OURS][1]), ("self", OURS)):
        own = [one for one in result["found"] if one["method"] == method]
        windows = [one["window"] for one in own]
        axes.plot(windows, [100 * one["recomputed"] for one in own], color=colour, label=f"here, {method} drafts", **LINE)
        flips = own[-1]["flips"]
        if flips:
            line = [50 * flips * window for window in windows]
            axes.plot(windows, line, color=GREY, linestyle=":", linewidth=1.2, label=f"p W / 2, p = {100 * flips:.1f} %")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(-0.02, 300)
    axes.set_xscale("log", base=2)
    _ticks_x(axes, (2, 4, 8, 16, 32, 64, 128, 256))
    axes.set_xlabel("window W")
    _plain_y(axes, "recomputed tokens, % of new ones")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def draw_throughput(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 6."""
    names = [one["workload"] for one in result["found"]]
    columns = [(THEIRS, name, "paper") for name in ("invariant", *map(str, SHARES))]
    columns += [(OURS, name, "here") for name in ("invariant", *map(str, SHARES))]
    for place, (colour, name, whose) in enumerate(columns):
        heights = [
            paper.THROUGHPUT[one["workload"]][name] if whose == "paper" else one["ratio"].get(name, np.nan)
            for one in result["found"]
        ]
        is_invariant = name == "invariant"
        fill = "white" if is_invariant else PALE[colour][SHARES.index(int(name))]
        axes.bar(
            np.arange(len(names)) + 0.1 * (place - 3.5) + (0.015 if place > 3 else -0.015),
            heights,
            0.095,
            color=fill,
            edgecolor=colour if is_invariant else fill,
            hatch="////" if is_invariant else None,
            label=f"{whose}, {'batch-invariant' if is_invariant else f'{name} % deterministic'}",
        )
    _one(axes)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.65)
    axes.set_ylabel("tokens per second / ordinary")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")


def draw_latency(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 7: bars are P99, dashes P50."""
    theirs = {
        share: [(paper.e2e_ratio(share, load, 0), paper.e2e_ratio(share, load, 1)) for load in range(3)] for share in SHARES
    }
    _by_load(axes, result, "e2e", theirs)
    axes.plot([], [], "_", color=INK, markersize=9, label="P50 of each")
    axes.set_ylabel("latency / ordinary; bars: P99, dashes: P50")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")


def draw_first_token(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 8."""
    theirs = {share: [(None, ratio) for ratio in ratios] for share, ratios in paper.TTFT_P99.items()}
    _by_load(axes, result, "ttft", theirs)
    axes.set_ylabel("P99 time to first token / ordinary")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")


def draw_speeds(axes: "Axes", result: Found, predicted: dict[str, Any]) -> None:
    """Panel 9: speeds over the best of the map, with the paper's below."""
    from matplotlib.patches import Rectangle

    cells = {(one["window"], one["groups"]): one["ratio"] for one in result["found"]}
    best = max(cells.values())
    windows = sorted({window for window, _ in cells})
    groups = sorted({group for _, group in cells})
    grid = np.array([[cells.get((window, group), np.nan) / best for window in windows] for group in groups])
    axes.imshow(grid, cmap="Blues", vmin=0, vmax=1.15, origin="lower", aspect="auto")
    for row, group in enumerate(groups):
        for column, window in enumerate(windows):
            value = grid[row, column]
            theirs = paper.speed(window, group)
            ink = "white" if value > 0.75 else INK
            if not np.isnan(value):
                axes.text(column, row + 0.12, f"{value:.2f}", ha="center", va="center", fontsize=11, color=ink)
            if theirs is not None:
                style = {"color": THEIRS, "backgroundcolor": "#ffffffd0"}
                axes.text(column, row - 0.22, f"{theirs:.2f}", ha="center", va="center", fontsize=8.5, **style)
    for number, ((name, device), colour) in enumerate(zip(predicted.items(), DEVICE_COLOURS, strict=True)):
        top = max((one for one in device["speeds"] if (one["window"], one["groups"]) in cells), key=lambda one: one["ratio"])
        inset = 0.04 + 0.035 * number
        corner = windows.index(top["window"]) - 0.5 + inset, groups.index(top["groups"]) - 0.5 + inset
        side = 1 - 2 * inset
        look = {"fill": False, "edgecolor": colour, "linestyle": "--", "linewidth": 1.8}
        axes.add_patch(Rectangle(corner, side, side, label=f"predicted best, {name}", **look))
    axes.plot([], [], "s", color=THEIRS, markersize=5, label="paper, over its best")
    axes.set_xticks(range(len(windows)), [str(window) for window in windows])
    axes.set_yticks(range(len(groups)), [str(group) for group in groups])
    axes.set(xlabel="window W", ylabel="groups G; numbers: speed / best of the map")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))


DRAWN: tuple[Callable[["Axes", Found, dict[str, Any]], None], ...] = (
    draw_passes,
    draw_products,
    draw_one_request,
    draw_spans,
    draw_recompute,
    draw_throughput,
    draw_latency,
    draw_first_token,
    draw_speeds,
)


def _by_load(axes: "Axes", result: Found, what: str, theirs: dict[int, list[tuple[float | None, float | None]]]) -> None:
    """Bars by load: the paper's three shares, then ours."""
    loads = list(dict.fromkeys(one["load"] for one in result["found"]))
    ours = {
        share: [
            (one["ratio"][f"{what}_p50"] if what == "e2e" else None, one["ratio"][f"{what}_p99"])
            for one in result["found"]
            if one["share"] == share
        ]
        for share in SHARES
    }
    columns = [(THEIRS, share, theirs[share], "paper") for share in SHARES]
    columns += [(OURS, share, ours[share], "here") for share in SHARES]
    for place, (colour, share, pairs, whose) in enumerate(columns):
        xs = np.arange(len(loads)) + 0.13 * (place - 2.5) + (0.02 if place > 2 else -0.02)
        heights = [np.nan if high is None else high for _, high in pairs]
        fill = PALE[colour][SHARES.index(share)]
        _bars(axes, xs, heights, 0.12, fill, f"{whose}, {share} % deterministic", size=7.5)
        for x, (middle, _) in zip(xs, pairs, strict=True):
            if middle is not None:
                axes.plot(x, middle, "_", color=INK, markersize=9)
    _one(axes)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.5, 160)
    axes.set_yticks([0.5, 1, 2, 4, 8, 16, 32], ["0.5", "1", "2", "4", "8", "16", "32"])
    names = [f"{load:.0%} of capacity\npaper: {qps}/s" for load, qps in zip(loads, (4, 5, 5.5), strict=True)]
    axes.set_xticks(range(len(loads)), names)


def _bars(axes: "Axes", xs: Any, heights: Any, width: float, colour: str, label: str, *, size: float = 8.5) -> None:
    """Bars with their heights on top."""
    bars = axes.bar(xs, heights, width, color=colour, label=label)
    axes.bar_label(bars, [f"{height:.2f}" if height < 10 else f"{height:.0f}" for height in heights], fontsize=size, padding=1)


def _one(axes: "Axes") -> None:
    axes.axhline(1, color=GREY, linewidth=0.9, zorder=0.5)


def _rows_axis(axes: "Axes", ticks: tuple[int, ...]) -> None:
    axes.set_xscale("log", base=2)
    _ticks_x(axes, ticks)
    axes.set_xlabel("rows")


def _ticks_x(axes: "Axes", ticks: tuple[int, ...]) -> None:
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _plain_y(axes: "Axes", label: str) -> None:
    """Figures such as 0.5 and 4 in place of powers."""
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
