"""Panel 3: one deterministic request among ordinary ones, compared with making all of them batch-invariant."""

from statistics import median
from typing import Any

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

BASE = "ordinary B + 1"
CASES = ("ordinary B", BASE, "batch-invariant, compiled", "all deterministic", "one deterministic")


def one_request(*, shape: Shape, batch: int, lengths: Lengths, repeats: int) -> dict[str, Any]:
    """New tokens per second of `batch` or one more requests, in turn; ratios to ordinary generation of one more.

    "batch-invariant, compiled" pays in all requests, "one deterministic" in one.
    """
    model = model_of(shape)
    new = lengths[1]
    room = {"max_len": sum(lengths)}
    own = {number: engine_of(model, max_requests=number, **room) for number in (batch, batch + 1)}
    invariant = engine_of(model, max_requests=batch + 1, schedule=compiled_invariant(model.cfg), **room)
    requests = requests_of(model, [lengths] * (batch + 1))
    runs = {
        CASES[0]: (own[batch], requests[:batch]),
        CASES[1]: (own[batch + 1], requests),
        CASES[2]: (invariant, mixed(requests, 100)),
        CASES[3]: (own[batch + 1], mixed(requests, 100)),
        CASES[4]: (own[batch + 1], mixed(requests, 1)),
    }
    for engine, asked in runs.values():
        engine.prepare(len(asked), BOTH)
    if refused := refusal(*runs[CASES[2]]):
        del runs[CASES[2]]
    seen = Seen()
    tok_per_s: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name, (engine, asked) in list(runs.items())[:: 1 if number % 2 == 0 else -1]:
            played = play(engine, asked)
            seen.add_all(asked, played, "compiled" if engine is invariant else "")
            tok_per_s[name].append(new * len(asked) / played.seconds)
    ratios = {name: [a / b for a, b in zip(each, tok_per_s[BASE], strict=True)] for name, each in tok_per_s.items()}
    return {
        "found": {name: {"tok_per_s": median(each), "ratio": median(ratios[name])} for name, each in tok_per_s.items()},
        "refused": refused,
        "bits": seen.counts(),
    }
