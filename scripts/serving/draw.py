"""The picture of what deterministic requests cost a server."""

from collections.abc import Mapping, Sequence
from pathlib import Path

TITLES = ("latency, P50", "latency, P99", "time to first token, P99")
# LLM-42 (SOSP), figures 11 and 12, 8 B, QPS 4 and 5.5: what all and 10 % of deterministic requests cost
PAPER = {1.0: ((6.3, 6.8), (2.3, 3.3), (10.4, 24.7)), 0.1: ((1.2, 1.5), (1.15, 1.27), (1.6, 2.0))}
NAMES = {0.1: "ordinary requests, 10 % of all deterministic", 1.0: "all requests deterministic"}
COLOURS = {0.1: "#7a7a7a", 1.0: "#1b6ca8"}


def draw(ratios: Mapping[tuple[float, float], Sequence[float]], path: Path) -> None:
    """Bars of `ratios` by load and share, a panel for each of `TITLES`; the paper's ranges as bands; a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(TITLES), sharey=True)
    loads = sorted({load for load, _ in ratios})
    lowest = min(0.75, *(height for heights in ratios.values() for height in heights))
    for place, (axes, title) in enumerate(zip(panels, TITLES, strict=True)):
        axes.axhline(1, color="0.4", linewidth=0.8)
        for number, (share, name) in enumerate(NAMES.items()):
            low, high = PAPER[share][place]
            axes.axhspan(low, high, color=COLOURS[share], alpha=0.15, linewidth=0, label=f"LLM-42's, {share:.0%} deterministic")
            xs = [index + 0.34 * (number - 0.5) for index in range(len(loads))]
            heights = [ratios[load, share][place] for load in loads]
            bars = axes.bar(xs, [height - 1 for height in heights], 0.32, bottom=1, color=COLOURS[share], label=name)
            axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8, padding=2)
        axes.set(title=title, xlabel="load, share of capacity", yscale="log", ylim=(0.8 * lowest, 30))
        axes.set_xticks(range(len(loads)), [f"{load:.0%}" for load in loads])
        axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("over the same load\nwithout deterministic requests")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)
