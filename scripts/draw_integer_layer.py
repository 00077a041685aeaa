"""Draws docs/integer_layer.png: the integers of one token in the first layer of the shipped model, step by step.

    python -m scripts.draw_integer_layer [--prompt TEXT] [--picture FILE.png]

All numbers come from the definition, detspec/integer/spec.py; at the right stands what they mean.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import detspec as ds
from detspec.integer import spec
from detspec.integer.spec import FRACTION, Activations
from detspec.model.to_integer import spec_model
from detspec.viz.figures import COLOURS, matplotlib_needed

PICTURE = Path(__file__).parents[1] / "docs" / "integer_layer.png"
SHOWN = 6  # numbers of each row
STREAM, WIDE, NARROW, SUM = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[3]


class Row(NamedTuple):
    """A step: what it is, its first integers, and what one of them is worth."""

    what: str
    kind: str
    numbers: Sequence[int]
    colour: str
    step: float = 0.0  # the worth of one; 0 if the numbers are parts of others
    note: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the prompt, and draws its last token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="def add(a, b):\n", metavar="TEXT")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE.png")
    args = parser.parse_args(argv)
    model = ds.load(weights="integer")
    assert model.tokenizer is not None
    draw(args.picture, rows_of(*spec_model(model.cfg, model.params), model.tokenizer.encode(args.prompt)))
    return 0


def rows_of(weights: dict[str, Any], sizes: spec.Sizes, tokens: Sequence[int]) -> list[Row]:
    """The steps of the last token in the first layer, all by functions of the definition."""
    layer = weights["layers"][0]
    text = spec.Text({**weights, "layers": [layer]}, sizes)
    x = weights["embed"][np.asarray(tokens)].astype(np.int64)
    row = spec.normed(x, layer["attn_norm"], sizes.epsilon)
    high = (row.values + 128) >> 8
    low = row.values - 256 * high
    matrix = layer["q"]
    sums = [spec.dot(word[-1:], matrix.values.T.astype(np.int64))[0] for word in (high, low)]
    q = spec.product(row, matrix)
    mixed = text._mixed(0, layer, row, np.arange(len(tokens)))
    after = spec.added(x, mixed)
    mlp = spec.normed(after, layer["mlp_norm"], sizes.epsilon)
    gate = spec.product(mlp, layer["gate"])
    gated = spec.gated(gate, spec.product(mlp, layer["up"]))
    out = spec.added(after, spec.product(gated, layer["down"]))
    fixed = 2.0**-FRACTION

    def first(values: np.ndarray) -> list[int]:
        return [int(value) for value in np.asarray(values)[:SHOWN]]

    return [
        Row("the stream", "int32, 16 fraction bits", first(x[-1]), STREAM, fixed),
        Row("after the norm", "15 bits, a scale for the row", first(row.values[-1]), WIDE, worth(row), scale(row)),
        Row("its high words", "int8", first(high[-1]), NARROW, note="value = 256 · high + low"),
        Row("its low words", "int8", first(low[-1]), NARROW),
        Row(
            "one row of the weights",
            "int8, a scale for the row",
            first(matrix.values[0]),
            NARROW,
            float(matrix.mantissa[0]) * 2.0 ** float(matrix.exponent[0]),
            f"· {int(matrix.mantissa[0])} · 2^{int(matrix.exponent[0])}",
        ),
        Row("sums of high words", "int32, exact in any order", first(sums[0]), SUM, note="the same on any chip"),
        Row("sums of low words", "int32, exact in any order", first(sums[1]), SUM),
        Row("queries", "int32, 16 fraction bits", first(q[-1]), STREAM, fixed),
        Row("the stream after attention", "int32, 16 fraction bits", first(after[-1]), STREAM, fixed),
        Row("gate times up", "15 bits, a scale for the row", first(gated.values[-1]), WIDE, worth(gated), scale(gated)),
        Row("the stream after the layer", "int32, 16 fraction bits", first(out[-1]), STREAM, fixed),
    ]


def worth(row: Activations) -> float:
    """Worth of one of the values of the last row."""
    return float(row.mantissa[-1]) * 2.0 ** float(row.exponent[-1])


def scale(row: Activations) -> str:
    """Mantissa and exponent of the last row, as text."""
    return f"· {int(row.mantissa[-1])} · 2^{int(row.exponent[-1])}"


def draw(file: Path, rows: Sequence[Row]) -> None:
    """Draws a line of boxes for each step, from top to bottom."""
    with matplotlib_needed():
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    figure = Figure(figsize=(11, 0.56 * len(rows) + 0.7))
    axes = figure.subplots()
    for number, row in enumerate(rows):
        y = -number
        axes.text(-0.15, y, row.what, ha="right", va="center", fontsize=11)
        axes.text(-0.15, y - 0.3, row.kind, ha="right", va="center", fontsize=7.5, color="0.45")
        for place, value in enumerate(row.numbers):
            box = Rectangle((place, y - 0.36), 0.94, 0.72, facecolor=row.colour, alpha=0.22, edgecolor=row.colour)
            axes.add_patch(box)
            axes.text(place + 0.47, y, str(value), ha="center", va="center", fontsize=9.5, family="monospace")
        axes.text(SHOWN + 0.05, y, "…", va="center", fontsize=11)
        meaning = ", ".join(f"{row.step * value:.3f}" for value in row.numbers[:3]) + ", …" if row.step else ""
        axes.text(SHOWN + 0.4, y + 0.13 * bool(row.note and meaning), row.note, va="center", fontsize=9, color="0.25")
        if meaning:
            axes.text(SHOWN + 0.4, y - 0.2 * bool(row.note), f"= {meaning}", va="center", fontsize=9, color="0.25")
    axes.set_xlim(-2.6, SHOWN + 2.7)
    axes.set_ylim(0.6 - len(rows), 0.9)
    axes.axis("off")
    axes.set_title("One token in the first layer of the shipped model: integers, and what they stand for", fontsize=11.5)
    figure.tight_layout()
    figure.savefig(file, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
