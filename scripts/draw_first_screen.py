#!/usr/bin/env python
"""Draws the figure of the README's first screen: texts that change in a crowd, and the speed of four systems.

The left panel shows `detspec demo`'s requests, alone and all at once, from the shipped model. --record generates them on this
machine. The right panel is of `scripts/race.py`'s figures: decoding of 32 requests at once, and texts that change.

    python scripts/draw_first_screen.py --record          # writes docs/data/first_screen.json, then the picture
    python scripts/draw_first_screen.py                   # draws docs/first_screen.png from what is recorded
"""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from race import describe_machine
from race_systems.results import Sample, seconds_of
from race_systems.systems import DETERMINISTIC as RACED_OWN

import detspec as ds
from detspec.demo.demo import DETERMINISTIC, FIRST_SEED, KINDS, NUM_SEEDS, ORDINARY, demo_prompts, one_run, ready_engine
from detspec.jobs.comparison import first_differing
from detspec.model.params import num_params
from detspec.viz.colours import CHANGED, FAINT, GREY, INK
from detspec.viz.figures import matplotlib_needed

RACED_ON = "2026-11-29"  # the race keeps no date; its commit has it
ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "data" / "first_screen.json"
RACED = ROOT / "docs" / "data" / "race_100m_zen4.json"
PICTURE = ROOT / "docs" / "first_screen.png"
NEW_TOKENS = 256
BATCH = 32  # of the race
SIZE = (8.6, 4.7)  # inches
DPI = 220
NUM_COLOURS = 48
LEFT = 0.025
MIDDLE = 0.50
RIGHT = 0.985
COUNTS = 1900  # tokens a second at the right edge, where numbers of texts end
OWN = "#1f6fb2"
OTHER = GREY
# names of the race, and how the picture calls them
SYSTEMS = {
    RACED_OWN: "detspec, bf16",
    "openvino float32": "OpenVINO, fp32",
    "openvino bfloat16": "OpenVINO, bf16",
    "vllm": "vLLM for CPUs, bf16",
    "llama.cpp": "llama.cpp, bf16",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Records if asked to, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="generate the texts of the left panel here")
    parser.add_argument("--data", type=Path, default=RECORDED, metavar="FILE", help="what is recorded")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE.png")
    args = parser.parse_args(argv)
    if args.record:
        args.data.write_text(as_text(record(ds.load())), encoding="utf-8")
    draw(args.picture, json.loads(args.data.read_text()), json.loads(RACED.read_text()))
    return 0


def record(model: ds.Model) -> dict[str, Any]:
    """The demonstration's requests alone and all at once: where each text forks, for both kinds of generation."""
    prompts = demo_prompts() * NUM_SEEDS
    sampling = ds.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=FIRST_SEED, ignore_eos=True)
    forks = {}
    for kind in KINDS:
        alone, crowd = (
            one_run(
                ready_engine(model, batch, prompts, NEW_TOKENS, "none", kind), kind, "", prompts, range(len(prompts)), sampling
            )
            for batch in (1, len(prompts))
        )
        pairs = zip(alone.completions, crowd.completions, strict=True)
        forks[kind] = [first_differing(own.token_ids, other.token_ids) for own, other in pairs]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {name: fact for name, fact in describe_machine().items() if name in ("cpu", "cores", "python")},
        "fingerprint": ds.fingerprint(),
        "model": {"digest": model.digest, "dtype": model.cfg.dtype, "num_params": num_params(model.cfg)},
        "settings": {"new_tokens": NEW_TOKENS, "temperature": 1.0, "first_seed": FIRST_SEED, "requests": len(prompts)},
        "forks": forks,
    }


def as_text(recorded: dict[str, Any]) -> str:
    """JSON, a line for each part."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(part)}" for name, part in recorded.items()) + "\n}\n"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A system of the race in one dtype."""

    label: str
    is_own: bool
    tok_per_s: float  # of decoding, all requests together
    num_changed: int  # texts


def bars_of(raced: dict[str, Any]) -> list[Bar]:
    """The bars of the right panel, in the race's order."""
    samples = [Sample(**sample) for sample in raced["samples"]]
    steps = raced["settings"]["new_tokens"] - 1
    return [
        Bar(
            label,
            name == RACED_OWN,
            BATCH * steps / median(seconds_of(samples, BATCH, name, "decode")),
            raced["systems"][name]["num_changed"],
        )
        for name, label in SYSTEMS.items()
    ]


def draw(path: Path, recorded: dict[str, Any], raced: dict[str, Any]) -> None:
    """Writes the picture."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
    figure = Figure(figsize=SIZE, facecolor="white")
    requests = recorded["settings"]["requests"]
    figure.text(LEFT, 0.94, f"The same prompt, alone and among {requests - 1}", size=12, weight="bold")
    draw_texts(figure, recorded)
    figure.text(MIDDLE, 0.94, f"Decoding {BATCH} requests at once", size=12, weight="bold")
    draw_speeds(figure.add_axes((MIDDLE, 0.215, RIGHT - MIDDLE, 0.665)), raced)
    for number, line in enumerate(footnotes(recorded, raced)):
        figure.text(LEFT, 0.060 - 0.040 * number, line, size=8, color=FAINT)
    figure.savefig(path, dpi=DPI)
    shrink(path)


def shrink(path: Path) -> None:
    """Writes the picture again in few colours, in a third of the bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def draw_texts(figure: Any, recorded: dict[str, Any]) -> None:
    """Draws a row for each text, the ordinary ones above the deterministic ones."""
    from detspec.viz.forks import draw_forks, num_forked

    for kind, bottom in ((ORDINARY, 0.575), (DETERMINISTIC, 0.215)):
        axes = figure.add_axes((LEFT, bottom, 0.42, 0.27))
        rows = [(recorded["settings"]["new_tokens"], fork) for fork in recorded["forks"][kind]]
        draw_forks(axes, rows)
        changed = num_forked(rows)
        verdict = f"{changed} of {len(rows)} change"
        axes.text(0, 1.05, f"{kind} generation", transform=axes.transAxes, size=11)
        axes.text(1, 1.05, verdict, transform=axes.transAxes, size=11, ha="right", weight="bold", color=ink_of(changed))
        axes.set_xticks(range(0, recorded["settings"]["new_tokens"] + 1, 64))
        axes.tick_params(labelsize=9.5, length=3, labelbottom=kind == DETERMINISTIC)
    axes.set_xlabel("new token", size=10.5, loc="left")
    axes.text(1, -0.3, "■ after the first changed one", transform=axes.transAxes, size=10.5, ha="right", color=CHANGED)


def draw_speeds(axes: Any, raced: dict[str, Any]) -> None:
    """Draws a bar for each system and dtype, with its speed and the number of its texts that change."""
    bars = sorted(bars_of(raced), key=lambda bar: -bar.tok_per_s)
    bars.sort(key=lambda bar: not bar.is_own)  # at the top
    for place, bar in enumerate(bars):
        axes.barh(place, bar.tok_per_s, 0.72, color=OWN if bar.is_own else OTHER, linewidth=0)
        inside = {"va": "center", "size": 10, "color": "white" if bar.is_own else INK}
        axes.text(22, place, bar.label, weight="bold" if bar.is_own else "normal", **inside)
        axes.text(bar.tok_per_s + 20, place, f"{bar.tok_per_s:.0f}", va="center", size=10.5)
        shown = {"va": "center", "size": 11, "weight": "bold", "color": ink_of(bar.num_changed)}
        axes.text(COUNTS, place, f"{bar.num_changed} of {raced['settings']['texts']}", ha="right", **shown)
    axes.text(COUNTS, -0.62, "texts change", ha="right", va="bottom", size=10.5)
    axes.set(xlim=(0, COUNTS), ylim=(len(bars) - 0.5, -0.5), yticks=[], xticks=range(0, 1401, 400))
    axes.set_xlabel("tokens a second, on two CPU cores", size=10.5, loc="left")
    axes.tick_params(labelsize=9.5, length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 1460)


def ink_of(changed: int) -> str:
    """The colour of a number of texts that change."""
    return CHANGED if changed else OWN


def footnotes(recorded: dict[str, Any], raced: dict[str, Any]) -> list[str]:
    """Lines that say what was measured where."""
    model = recorded["model"]
    settings = raced["settings"]
    return [
        f"Left: the shipped model, {model['num_params'] / 1e6:.1f} M weights in {model['dtype']}, temperature 1; "
        f"{recorded['fingerprint']['device_kind']}, {recorded['date']}.",
        f"Right: {raced['model']['num_params'] / 1e6:.1f} M random weights, prompts of {settings['prompt_len']} tokens, "
        f"{settings['new_tokens']} new ones, greedy; {raced['fingerprint']['device_kind']}, {RACED_ON}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
