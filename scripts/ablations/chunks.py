"""How long the chunks between two thoughts are (Thinking States): accuracy, and time to read a prompt.

    python -m scripts.ablations.chunks

Setup      Coin flips, for each chunk two models, trained for 250 steps on up to 4 operations. They read 60 problems of 40
           operations, 4 at once, without drafted thoughts. Medians of 15 rounds; speed by processor time, over the first model.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids), jax 0.10.2, nothing else running. 3 minutes.
Found      The longer the chunk, the faster it reads and the slower it learns. Only chunks of 4 tokens, an operation each, are
           right far beyond the training. The order of requests moves no bit. Quartiles of the speed lie within 0.4.

           chunk                                2           4           8          16         16, no thoughts
           right of 4 operations, %, two seeds  100, 100    100, 100    100, 90    68, 68     -
           right of 40                          67, 52      100, 100    75, 65     45, 58     58
           passes a prompt                      41, 41      41, 41      20, 20     10, 10     0
           speed                                1, 0.97     1.1, 1.1    2.0, 1.9   3.2, 3.3   4.7
"""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import detspec as ds
from detspec.train.problems.chunks import encode
from detspec.train.problems.tasks import tokenizer_of
from scripts.ablations.models import thinker
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out
from scripts.ablations.turns import ROUNDS, Run, Turns, asked, generation, in_turns
from scripts.replications.thinking_states.prompts import draw_problems
from scripts.replications.thinking_states.tasks import PARITY

CHUNKS = {"tiny": (8,), "full": (2, 4, 8, 16)}
SEEDS = {"tiny": (0,), "full": (0, 1)}
SHORT, LONG = (4, 40)  # operations of a problem: as many as in training at most, and ten times as many
REQUESTS = 4


class Reading(NamedTuple):
    """Which model reads, and whether it thinks."""

    chunk: int
    seed: int
    thinks: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, measures and reports."""
    plot = Plot("chunk", "seed", (f"right % of {SHORT}", f"right % of {LONG}", "passes a prompt", "speed by cpu time"))
    promise = Promise("moved %", lambda row: row["seed"] == "no thoughts")
    return carry_out("chunks", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each chunk and seed, and one for the last model without thoughts, reading problems of `LONG` operations.

    Speed is compared with the first model, bits with those of the same requests in reverse order, and with thoughts.
    """
    names = [Reading(*name) for name in itertools.product(CHUNKS[options.size], SEEDS[options.size])]
    models = {name: thinker(name.chunk, SHORT, options.seed + name.seed, options) for name in names}
    problems = draw_problems(PARITY.task, num_ops=LONG, number=(ROUNDS[options.size] + 1) * REQUESTS, seed=options.seed)
    encoded = encode(problems, tokenizer_of(PARITY.task), "thinking")
    answers = np.array([one.continuation for one in encoded], np.uint32)[REQUESTS:]  # of counted rounds

    def run_of(name: Reading, step: int = 1) -> Run:
        model = models[name._replace(thinks=True)][0]
        schedule = ds.default_schedule(model.cfg).with_budget(64, 1)
        sampling = [asked(options, max_tokens=answers.shape[1], thinking=name.thinks)] * REQUESTS
        batches = (encoded[at : at + REQUESTS][::step] for at in range(0, len(encoded), REQUESTS))
        return generation(model, schedule, sampling, prompts=[one.prompt for batch in batches for one in batch])

    found = in_turns({name: run_of(name) for name in [*names, names[-1]._replace(thinks=False)]}, options)
    reverse = in_turns({name: run_of(name, step=-1) for name in names}, options, rounds=1)
    rows = []
    for name, own in found.items():
        right = [(text[0] == answer).all() for text, answer in zip(itertools.chain(*own.texts), answers, strict=True)]
        other = Turns(texts=[texts[::-1] for texts in reverse[name._replace(thinks=True)].texts])
        rows.append(
            {
                "seed": str(name.seed) if name.thinks else "no thoughts",
                "chunk": name.chunk,
                f"right % of {SHORT}": models[name][1] if name.thinks else math.nan,
                f"right % of {LONG}": 100 * float(np.mean(right)),
                "passes a prompt": own.counts[0]["num_read_passes"] / REQUESTS,
                **own.compared_with(found[names[0]]),
                "moved %": own.moved_from(other),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
