"""Panel 4: where generation among arriving requests first differs from generation alone, and for how long they agree after."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from detspec.engine.request import Completion
from scripts.replications.llm42.traffic import (
    BOTH,
    Seen,
    Shape,
    arrivals,
    compiled_invariant,
    engine_of,
    mixed,
    model_of,
    play,
    requests_of,
)

ORDINARY = "ordinary"
COMPILED = "ordinary, compiled products"
DETERMINISTIC = "deterministic"


def spans(*, shape: Shape, requests: int, in_flight: int, prompt_lens: tuple[int, int], new: int, gap: float) -> dict[str, Any]:
    """Requests alone, one after the other, and as a Poisson process of one in `gap` steps, compared token by token.

    Arrivals count steps of the engine: so the same requests meet in every run.

    Returns for each kind of generation, and each request, the first new token that differs, and the first log-probability whose
    bits differ (None: never); "second": how many tokens agree after the first different one until the next.
    """
    model = model_of(shape)
    rng = np.random.default_rng(0)
    lengths = [(int(rng.integers(*prompt_lens, endpoint=True)), new) for _ in range(requests)]
    room = {"max_requests": in_flight, "max_len": prompt_lens[1] + new}
    own = engine_of(model, **room)
    compiled = engine_of(model, schedule=compiled_invariant(model.cfg), **room)
    asked = requests_of(model, lengths)
    kinds = {ORDINARY: (own, asked), COMPILED: (compiled, asked), DETERMINISTIC: (own, mixed(asked, 100))}
    for number in (1, in_flight):
        own.prepare(number, BOTH)
        compiled.prepare(number, BOTH._replace(deterministic=False))
    seen = Seen()
    found = {}
    for name, (engine, each) in kinds.items():
        alone = {request.id: play(engine, [request]).completions[request.id] for request in each}
        together = play(engine, each, arrivals(requests, gap), by_steps=True)
        if engine is own:
            seen.add_all(each, together)
            for request in each:
                seen.add(alone[request.id], deterministic=request.sampling.deterministic)
        found[name] = [compare(alone[id], together.completions[id]) for id in alone]
    return {"found": found, "bits": seen.counts()}


def compare(alone: Completion, other: Completion) -> dict[str, int | None]:
    """Finds the differences of two completions of a request, see `spans`."""
    tokens = agreements(alone.token_ids, other.token_ids)
    bits = agreements(*(np.asarray(one.logprobs, np.float32).view(np.uint32).tolist() for one in (alone, other)))
    return {"token": tokens[0], "second": tokens[1], "bits": bits[0]}


def agreements(a: Sequence[int], b: Sequence[int]) -> tuple[int | None, int | None]:
    """The place of the first difference and how many places agree between it and the next one or the end.

    a b c d e   a b x d y   ->  2, 1
    """
    differ = [i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other]
    if not differ:
        return None, None
    following = differ[1] if len(differ) > 1 else len(a)
    return differ[0], following - differ[0] - 1
