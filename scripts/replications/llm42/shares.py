"""Panel 6: throughput of six workloads by the share of deterministic requests."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from scripts.replications.llm42.traffic import (
    BOTH,
    Lengths,
    Seen,
    Shape,
    compiled_invariant,
    engine_of,
    mixed,
    model_of,
    play,
    refusal,
    requests_of,
)

# Least and most tokens of prompts and of texts. The fixed ones are LLM-42's over 16. The other two have short prompts and
# texts, and long prompts with short texts, evenly in the logarithm; they stand for the data sets, whose texts are not here.
WORKLOADS = {
    "ShareGPT": ((4, 64), (4, 48)),
    "ArXiv": ((128, 448), (8, 24)),
    "1K/256": ((64, 64), (16, 16)),
    "1K/1K": ((64, 64), (64, 64)),
    "4K/1K": ((256, 256), (64, 64)),
    "4K/4K": ((256, 256), (256, 256)),
}
MAX_LEN = 512


def lengths_of(workload: str, number: int, *, scale: float = 1.0, seed: int = 0) -> list[Lengths]:
    """Lengths of `number` requests, times `scale`."""
    rng = np.random.default_rng(seed)

    def draw(least: int, most: int) -> int:
        return max(2, round(scale * np.exp(rng.uniform(np.log(least), np.log(most)))))

    prompt, text = WORKLOADS[workload]
    return [(draw(*prompt), draw(*text)) for _ in range(number)]


def throughput(
    *,
    shape: Shape,
    in_flight: int,
    requests: int,
    workloads: Sequence[str],
    shares: Sequence[int],
    scale: float,
    least: tuple[int, float],
) -> dict[str, Any]:
    """Prompt and new tokens per second over those of ordinary generation in the same round, by workload and share.

    `least` are the rounds of a workload, and the seconds of ordinary generation in them: short texts get more rounds.
    "invariant" are all requests deterministic, with products that the compiler makes batch-invariant. It is two to three times
    as slow, so it takes part in the first round alone.
    """
    model = model_of(shape)
    room = {"max_requests": in_flight, "max_len": round(MAX_LEN * scale)}
    own = engine_of(model, **room)
    invariant = engine_of(model, schedule=compiled_invariant(model.cfg), **room)
    own.prepare(in_flight, BOTH)
    invariant.prepare(in_flight, BOTH._replace(ordinary=False))
    seen = Seen()
    found = []
    refused = refusal(invariant, mixed(requests_of(model, lengths_of(workloads[0], in_flight, scale=scale)), 100))
    for workload in workloads:
        asked = requests_of(model, lengths_of(workload, requests, scale=scale))
        runs = {str(share): (own, mixed(asked, share)) for share in (0, *shares)}
        compiled = {} if refused else {"invariant": (invariant, mixed(asked, 100))}
        tok_per_s: dict[str, list[float]] = {name: [] for name in runs | compiled}
        ordinary_s = 0.0
        number = 0
        while number < least[0] or ordinary_s < least[1]:
            taking_part = runs | (compiled if number == 0 else {})
            for name, (engine, each) in list(taking_part.items())[:: 1 if number % 2 == 0 else -1]:
                played = play(engine, each)
                seen.add_all(each, played, f"{workload} {'compiled' if engine is invariant else ''}")
                tok_per_s[name].append(played.num_tokens / played.seconds)
                ordinary_s += played.seconds if name == "0" else 0.0
            number += 1
        ratios = {name: [a / b for a, b in zip(each, tok_per_s["0"], strict=False)] for name, each in tok_per_s.items()}
        found.append(
            {
                "workload": workload,
                "rounds": number,
                "mean_prompt": float(np.mean([len(request.prompt_token_ids) for request in asked])),
                "mean_new": float(np.mean([request.sampling.max_tokens for request in asked])),
                "tok_per_s": {name: median(each) for name, each in tok_per_s.items()},
                "ratio": {name: median(each) for name, each in ratios.items()},
            }
        )
    return {"found": found, "refused": refused, "bits": seen.counts()}
