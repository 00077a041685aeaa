"""Weights and caches of several dtypes: loss on held-out text, speed of decoding, and whether bits move.

    python -m scripts.ablations.dtypes

Setup      The shipped model, whose weights are bfloat16; 4 requests of 96 new tokens without drafts, 15 rounds; 32 held-out
           texts of 511 tokens. Medians, quartiles in brackets; speed by processor time, over the first setting.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids, AMX), jax 0.10.2, Python 3.11.7, nothing else running. 39 s with all to
           compile. Another Python has other held-out files.
Found      A cache of bfloat16 moves no bit of activations in bfloat16. One of float16 has fewer small numbers and moves 0.9 %
           (none on an EPYC). Those of float32 are rounded by both: 99.9 % of tokens move with a bfloat16 cache and 99.5 %
           with a float16 one, and the loss by 30 (-48 to 67) and -3 (-11 to 5) millionths of a nat.

           weights      nats a token    speed, cache float32    bfloat16            float16
           bfloat16     2.5139          1                       1.04 (1.02-1.10)    0.91 (0.88-0.96)
           float32      2.5138          0.84 (0.80-0.87)        0.88 (0.83-0.92)    0.79 (0.75-0.83)
           int8         2.5142          1.29 (1.23-1.34)        1.37 (1.31-1.45)    1.18 (1.12-1.26)     two runs
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import detspec as ds
from detspec.cache import cache_bytes
from scripts.ablations.models import heldout_texts, model_of, with_weights
from scripts.ablations.table import Options, Plot, Promise, Row, Spread, carry_out
from scripts.ablations.turns import Run, asked, generation, in_turns

REQUESTS = 4


class Setting(NamedTuple):
    """Dtypes of weights and cache. Activations have the dtype of the weights, with "int8" that of the shipped model."""

    weights: str
    cache: str


SETTINGS = {
    "tiny": [Setting("float32", "float32"), Setting("float32", "bfloat16"), Setting("int8", "float32")],
    "full": [Setting(w, c) for w in ("bfloat16", "float32", "int8") for c in ("float32", "bfloat16", "float16")],
}
# Caches that round keys and values, which need not keep bits: float16 has not the small numbers of bfloat16.
ROUNDED = [("float32", "bfloat16"), *((weights, "float16") for weights in ("bfloat16", "float32", "int8"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("cache", "weights", ("moved %", "1e-6 nats more", "speed by cpu time"))
    promise = Promise("moved %", lambda row: (row["weights"], row["cache"]) in ROUNDED)
    return carry_out("dtypes", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each setting: speed over that of the first, loss and bits compared with a float32 cache of the same weights."""
    own = model_of(options)
    settings = SETTINGS[options.size]
    models = {weights: with_weights(own, weights) for weights, _ in settings}
    schedules = {one: ds.default_schedule(own.cfg).with_numerics(cache_dtype=one.cache) for one in settings}

    def run_of(setting: Setting) -> Run:
        schedule = schedules[setting].with_budget(REQUESTS, 1)
        return generation(models[setting.weights], schedule, [asked(options)] * REQUESTS)

    found = in_turns({setting: run_of(setting) for setting in settings}, options)
    texts = heldout_texts(own, options)
    logprobs = {one: scored(models[one.weights], texts, schedules[one]) for one in settings}
    rows = []
    for one in settings:
        numerics = schedules[one].numerics
        page_bytes = cache_bytes(own.cfg, max_requests=1, max_len=1, numerics=numerics, num_pages=0)
        wide = logprobs[one._replace(cache="float32")]
        loss = {
            "nats a token": -float(logprobs[one].mean(dtype=np.float64)),
            "1e-6 nats more": Spread.of((1e6 * (wide - logprobs[one]).mean(1)).tolist()),
        }
        moved = 100 * float(np.mean(logprobs[one].view(np.uint32) != wide.view(np.uint32)))
        compared = {**found[one].compared_with(found[settings[0]]), "moved %": moved}
        rows.append({**one._asdict(), "bytes a position": page_bytes // numerics.page, **loss, **compared})
    return rows


def scored(model: ds.Model, texts: Sequence[Sequence[int]], schedule: ds.Schedule) -> np.ndarray:
    """Log-probabilities `[texts, tokens]` of all tokens but the first, four texts together."""
    found = [ds.score(model.params, model.cfg, texts[i : i + 4], schedule=schedule) for i in range(0, len(texts), 4)]
    return np.stack([logprobs[1:] for some in found for logprobs in some])


if __name__ == "__main__":
    sys.exit(main())
