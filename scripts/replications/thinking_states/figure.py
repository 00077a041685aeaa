"""Five pictures in one: accuracy by operations, by training length, by chunk and by layers with times; step times by chunks."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from detspec.viz.colours import FAINT, INK
from detspec.viz.figures import COLOURS, matplotlib_needed
from scripts.replications.thinking_states import paper
from scripts.replications.thinking_states.comparison import SWEPT, Results, runs_of, swept, tested

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, THEIRS, GREY, GREEN, PURPLE, OCHRE = COLOURS
LINE = {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
CURVES = {  # task and arm -> label, colour, line style
    ("parity", "thinking"): ("flips: Thinking States", OURS, "-"),
    ("parity", "cot"): ("flips: chain of thought", THEIRS, "-"),
    ("parity", "coconut"): ("flips: Coconut", GREEN, "-"),
    ("parity", "icot"): ("flips: iCoT", OCHRE, "-"),
    ("parity", "no_cot"): ("flips: neither", GREY, "-"),
    ("variables", "thinking"): ("variables: Thinking States", OURS, ":"),
    ("variables", "cot"): ("variables: chain of thought", THEIRS, ":"),
    ("variables", "no_cot"): ("variables: neither", GREY, ":"),
}


def draw(path: Path, results: Results) -> None:
    """Writes the figure as a PNG; pictures without a result say so. Raises `InputError` if matplotlib is missing."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    figure = Figure(figsize=(15, 8.6), dpi=110, layout="constrained", facecolor="white")
    drawn: dict[str, Callable[[Axes, Results], bool]] = {
        "Trained on up to 10 operations": by_operations,
        "Coin flips, by training length N": by_training_length,
        "Two hops and arithmetic": by_arm,
        "Arithmetic, by tokens of a chunk": lambda axes, found: by_setting(axes, found, "chunk", paper.CHUNKS),
        "Two hops, facts known, by layers in the loop": lambda axes, found: by_setting(axes, found, "loop", paper.LAYERS),
        "Time of a training step": step_times,
    }
    for axes, (title, draw_one) in zip(figure.subplots(2, 3).ravel(), drawn.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=11, weight="bold", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        if not draw_one(axes, results):
            axes.text(0.5, 0.5, "not measured", ha="center", color=FAINT, transform=axes.transAxes)
    figure.savefig(path)


def by_operations(axes: "Axes", results: Results) -> bool:
    """Mean accuracy over seeds, by operations."""
    for (task, arm), (label, colour, style) in CURVES.items():
        if curve := mean_curve(runs_of(results, task, arm)):
            axes.plot(*zip(*curve, strict=True), color=colour, linestyle=style, label=label, **LINE)
    return _accuracy_axes(axes, "operations", marked=10)


def by_training_length(axes: "Axes", results: Results) -> bool:
    """Coin flips after training on up to N operations."""
    for arm, colour, name in (("thinking", OURS, "Thinking States"), ("cot", THEIRS, "chain"), ("no_cot", GREY, "neither")):
        for most, style in zip(paper.LENGTHS, (":", "--", "-"), strict=True):
            runs = runs_of(results, "parity" if most == paper.LENGTHS[0] else f"parity{most}", arm)
            if curve := mean_curve(runs):
                axes.plot(*zip(*curve, strict=True), color=colour, linestyle=style, label=f"{name}, N = {most}", **LINE)
    return _accuracy_axes(axes, "operations")


def by_arm(axes: "Axes", results: Results) -> bool:
    """Accuracy of the paper and here, a pair of bars for each arm."""
    place = 0
    ticks = []
    for task, arms in paper.REASONING.items():
        for arm, (accuracy, _) in arms.items():
            if runs := runs_of(results, task, arm):
                axes.bar(place - 0.2, accuracy, 0.4, color=THEIRS, label=None if ticks else "paper")
                here = 100 * mean(tested(one, task) for one in runs)
                axes.bar(place + 0.2, here, 0.4, color=OURS, label=None if ticks else "here")
                ticks.append((place, f"{task} {arm}"))
                place += 1
        place += 1
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks], rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("right answers, %")
    if ticks:
        axes.set_ylim(0, 122)
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return bool(ticks)


def by_setting(axes: "Axes", results: Results, kind: str, theirs: dict[int, Any]) -> bool:
    """Accuracy by a setting, and milliseconds on a second axis."""
    runs = swept(results, kind)
    points = []
    for value, name in sorted(runs.items()):
        one = results[name]
        points.append((value, tested(one, "arithmetic" if kind == "chunk" else "two_hop")))
    if not points:
        return False
    axes.plot(*zip(*((at, 100 * share) for at, share in points), strict=True), color=OURS, label="here, %", **LINE)
    axes.plot(list(theirs), list(theirs.values()), color=THEIRS, label="paper, GSM, %", **LINE)
    axes.set(
        ylim=(-3, 103), ylabel="right answers, %", xlabel={"chunk": "tokens of a chunk", "loop": "layers in the loop"}[kind]
    )
    if kind == "chunk":
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({*theirs, *runs}), [f"{value}" for value in sorted({*theirs, *runs})])
    if (measured := SWEPT[kind][2]) in results:
        ms = dict(zip(results[measured]["models"], (one["ms"] for one in results[measured]["found"]), strict=True))
        other = axes.twinx()
        timed = [(value, ms[name]) for value, name in sorted(runs.items()) if name in ms]
        other.plot(*zip(*timed, strict=True), color=GREY, linestyle="--", label="here, ms", **LINE)
        other.set_ylim(0, None)
        other.set_ylabel("ms to 8 answers", color=GREY)
        other.spines["top"].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper center")
    return True


def step_times(axes: "Axes", results: Results) -> bool:
    """Training in parallel and through time, by chunks of a row."""
    if "step_time" not in results:
        return False
    found = results["step_time"]["found"]
    chunks = [one["chunks"] for one in found]
    axes.plot(chunks, [one["parallel_ms"] for one in found], color=OURS, label="given thoughts, in parallel", **LINE)
    axes.plot(chunks, [one["unrolled_ms"] for one in found], color=THEIRS, label="through time", **LINE)
    axes.set(ylim=(0, None), xlabel="chunks of a row", ylabel="ms")
    axes.legend(frameon=False, fontsize=8)
    return True


def mean_curve(runs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Accuracy in % by operations, the mean over runs; empty without any."""
    lengths = runs[0]["accuracy"] if runs else ()
    return [(int(n), 100 * mean(one["accuracy"][n] for one in runs)) for n in lengths]


def _accuracy_axes(axes: "Axes", x_label: str, marked: int | None = None) -> bool:
    if marked is not None:
        axes.axvline(marked, color="#bbbbbb", linewidth=1, linestyle="--")
    axes.set(ylim=(-3, 103), xlabel=x_label, ylabel="right answers, %")
    if axes.lines:
        # Below the axes, because curves are everywhere.
        axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    return len(axes.lines) > (marked is not None)
