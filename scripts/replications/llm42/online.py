"""Panels 7 and 8: latency and time to the first token under Poisson arrivals, by load and share of deterministic requests."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from scripts.replications.llm42.shares import MAX_LEN, lengths_of
from scripts.replications.llm42.traffic import BOTH, Seen, Shape, arrivals, engine_of, mixed, model_of, play, requests_of

QUANTITIES = {"e2e_p50": ("whole_s", 50), "e2e_p99": ("whole_s", 99), "ttft_p50": ("first_s", 50), "ttft_p99": ("first_s", 99)}
# LLM-42's: short chats, long prompts, and one in ten with a long text
MIX = (("ShareGPT", 0.45), ("ArXiv", 0.45), ("1K/1K", 0.1))


def latencies(
    *, shape: Shape, in_flight: int, requests: int, loads: Sequence[float], shares: Sequence[int], scale: float, repeats: int
) -> dict[str, Any]:
    """Latencies of streamed requests by load and share, and their median ratios to those of 0 % in the same round.

    `loads` are shares of the capacity: requests per second of ordinary generation when all requests are there at once,
    measured first. At one load and round all shares meet the same arrivals.
    """
    model = model_of(shape)
    engine = engine_of(model, max_requests=in_flight, max_len=round(MAX_LEN * scale))
    engine.prepare(None, BOTH)
    each = [lengths_of(name, round(share * requests) + 1, scale=scale) for name, share in MIX]
    lengths = [length for some in each for length in some]
    order = np.random.default_rng(1).permutation(len(lengths))[:requests]
    asked = requests_of(model, [lengths[i] for i in order])
    at_once = [requests / play(engine, asked, [0.0] * requests).seconds for _ in range(2)]
    capacity = at_once[-1]  # the first run warms up
    seen = Seen()
    found = []
    for load in loads:
        samples: dict[int, list[dict[str, float]]] = {share: [] for share in (0, *shares)}
        for number in range(repeats):
            due = arrivals(requests, 1 / (load * capacity), seed=number)
            for share in list(samples)[:: 1 if number % 2 == 0 else -1]:
                chosen = mixed(asked, share)
                played = play(engine, chosen, due)
                seen.add_all(chosen, played)
                samples[share].append(
                    {name: float(np.percentile(list(getattr(played, of).values()), q)) for name, (of, q) in QUANTITIES.items()}
                )
        for share, own in samples.items():
            found.append(
                {
                    "load": load,
                    "share": share,
                    "seconds": {name: median(sample[name] for sample in own) for name in QUANTITIES},
                    "ratio": {
                        name: median(a[name] / b[name] for a, b in zip(own, samples[0], strict=True)) for name in QUANTITIES
                    },
                }
            )
    return {"capacity_per_s": capacity, "found": found, "bits": seen.counts()}
