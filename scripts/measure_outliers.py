"""Loss of integer models of the shipped model with outliers, with and without the transforms that spread them.

    python scripts/measure_outliers.py --rows 4 --json out/outliers.json

Three channels after each norm, two of each MLP's inner channels and one of each head's values are made larger by a factor, and
the columns that read them smaller: in exact numbers the model stays the same. The texts are held out, and the definition in
numpy reads them. Without the transforms activations are rounded to 8 bits as they are.

Weights of 8 bits round small columns, too, so the factor costs something with activations of 15 bits as well. Weights of 22
bits show what activations alone lose.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import detspec as ds
from detspec.config import ModelConfig
from detspec.integer import spec
from detspec.integer.spec import FRACTION, IntMatrix, Text
from detspec.model import to_integer
from detspec.model.to_integer import integer_config, integer_params, spec_model
from detspec.train.corpus import read_corpus

HELDOUT = 25  # one file in so many is held out
CHANNELS, INNER, OF_HEAD = (7, 100, 200), (5, 60), 2
FACTORS = (1, 16, 256)
KINDS = ("15 bits", "8 bits, as they are", "8 bits, spread")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="texts")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a text")
    parser.add_argument("--factors", type=int, nargs="+", default=list(FACTORS), metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found = []
    print(f"{'weights':8} {'factor':>6}" + "".join(f" {kind:>20}" for kind in KINDS))
    for bits in (8, 22):
        for factor in args.factors:
            nats = {kind: loss(kind, factor, bits, args.rows, args.length) for kind in KINDS}
            found.append({"weight_bits": bits, "factor": factor, **nats})
            print(f"{bits:8} {factor:6}" + "".join(f" {nats[kind]:20.5f}" for kind in KINDS))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def loss(kind: str, factor: int, weight_bits: int, rows: int, length: int) -> float:
    """Nats a token of the shipped model with outliers in integers of this kind."""
    model = ds.load()
    assert model.tokenizer is not None
    params = with_outliers(model.cfg, model.params, factor)
    ids: list[int] = []
    for text in read_corpus("python_stdlib", HELDOUT).heldout:
        ids += [0, *model.tokenizer.encode(text.text, add_special_tokens=False)]
    with ExitStack() as stack:
        if kind == KINDS[1]:
            stack.enter_context(mock.patch.object(to_integer, "spreading", lambda _, params: jax.tree.map(unchanging, params)))
            stack.enter_context(mock.patch.object(spec, "spread", lambda row: row))
        if weight_bits > 8:
            stack.enter_context(mock.patch.object(to_integer, "_matrix", lambda x: rounded_matrix(x, weight_bits)))
        bits = 15 if kind == KINDS[0] else 8
        weights, sizes = spec_model(integer_config(model.cfg, bits), integer_params(model.cfg, params, bits))
        found = []
        for first in range(0, rows * length, length):
            read = np.asarray(ids[first : first + length + 1])
            found.append(spec.logprobs(Text(weights, sizes).read(read[:-1]), read[1:]) / 2**FRACTION)
    return -float(np.mean(found))


def unchanging(_: Any) -> Any:
    """The change of a weight that leaves it as it is."""
    return lambda x: x


def with_outliers(cfg: ModelConfig, params: dict[str, Any], factor: float) -> dict[str, Any]:
    """Weights of the same function, some of whose activations are larger by a `factor`."""
    layers = []
    for kind, weights in zip(cfg.layers, params["layers"], strict=True):
        layer = dict(weights)
        mixer = kind.mixer
        channels = np.asarray(CHANNELS) % cfg.d_model
        for norm, readers in (("attn_norm", "qkv"), ("mlp_norm", ("gate", "up"))):
            layer[norm] = layer[norm].at[channels].multiply(factor)
            layer |= {name: layer[name].at[:, channels].divide(factor) for name in readers}
        inner = np.asarray(INNER)
        layer["up"] = layer["up"].at[inner].multiply(factor)
        layer["down"] = layer["down"].at[:, inner].divide(factor)
        of_values = np.arange(mixer.num_kv_heads) * mixer.head_dim + OF_HEAD
        layer |= {name: layer[name].at[of_values].multiply(factor) for name in ("v", "v_bias") if name in layer}
        layer["o"] = layer["o"].at[:, np.arange(mixer.num_heads) * mixer.head_dim + OF_HEAD].divide(factor)
        layers.append(layer)
    return {**params, "layers": tuple(layers)}


def rounded_matrix(x: np.ndarray, bits: int) -> IntMatrix:
    """A matrix with more bits than int8 has, which the definition in numpy multiplies as well."""
    largest = np.maximum(np.abs(x).max(-1), to_integer.LEAST)
    _, exponent = np.frexp(largest)
    values = np.rint(np.ldexp(x, bits - 1 - exponent[:, None]))
    return IntMatrix(values.astype(np.int32), np.full(len(x), 2**14, np.int32), (exponent - bits + 1 - 14).astype(np.int32))


if __name__ == "__main__":
    sys.exit(main())
