"""The correctness line: one prompt many times among neighbours."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from detspec.engine.request import Completion, Request
from scripts.replications.llm42.traffic import BOTH, Shape, engine_of, mixed, model_of, requests_of


def repeated(*, shape: Shape, in_flight: int, prompt_len: int, new: int, times: int, control_times: int) -> dict[str, Any]:
    """How many different results one prompt gives, bit for bit, deterministic and ordinary; every other request is another one.

    Both also run once alone, which must give the same for the deterministic one.
    """
    model = model_of(shape)
    engine = engine_of(model, max_requests=in_flight, max_len=prompt_len + 1 + 2 * new)
    engine.prepare(None, BOTH)
    ordinary, *neighbours = requests_of(
        model, [(prompt_len, new), *((2 + i % prompt_len, 1 + i % (2 * new)) for i in range(64))]
    )
    (deterministic,) = mixed([ordinary], 100)

    def among(request: Request, number: int) -> Iterator[Request]:
        for i in range(number):
            yield dataclasses.replace(request, id=f"same {i}")
            yield neighbours[i % len(neighbours)]

    def results(request: Request, number: int) -> list[Completion]:
        return [one for one in engine.run(among(request, number)) if one.id.startswith("same")]

    found = [*engine.run([deterministic]), *results(deterministic, times)]
    control = [*engine.run([ordinary]), *results(ordinary, control_times)]
    return {
        "times": len(found),
        "unique": len({(one.token_ids, one.logprobs) for one in found}),
        "unique_digests": len({one.digest for one in found}),
        "control_times": len(control),
        "control_unique": len({(one.token_ids, one.logprobs) for one in control}),
        "control_unique_texts": len({one.token_ids for one in control}),
    }
