"""Panel 5: how many tokens are drafted in vain, by the window."""

from collections.abc import Sequence
from typing import Any

from detspec.engine.policy import Needs
from detspec.environment import default_schedule
from scripts.replications.llm42.traffic import BOTH, Lengths, Seen, Shape, engine_of, mixed, model_of, play, requests_of

METHODS = ("self", "int8")


def recomputed(*, shape: Shape, batch: int, lengths: Lengths, windows: Sequence[int]) -> dict[str, Any]:
    """Recomputed tokens over new ones, by draft and window; all requests are deterministic and end at their length.

    Without drafts, which is what runs by default where they cannot win, nothing is recomputed. "flips" is the chance that a
    drafted token whose predecessors were right is rejected. Ordinary generation is the control of the bits.
    """
    model = model_of(shape)
    new = lengths[1]
    own = default_schedule(model.cfg)
    room = {"max_requests": batch, "max_len": sum(lengths)}
    ordinary = requests_of(model, [lengths] * batch)
    asked = mixed(ordinary, 100)
    seen = Seen()
    plain = engine_of(model, **room)
    plain.prepare(batch, BOTH)
    for requests in (asked, ordinary):
        seen.add_all(requests, play(plain, requests))
    found = []
    for method in METHODS:
        for window in windows:
            schedule = own.with_budget(own.budget.rows, window)
            engine = engine_of(model, method=method, num_speculative_tokens=window - 1, schedule=schedule, **room)
            engine.prepare(batch, Needs(deterministic=True, ordinary=False, processing=False))
            played = play(engine, asked)
            seen.add_all(asked, played)
            stats = engine.stats
            found.append(
                {
                    "method": method,
                    "window": window,
                    "recomputed": stats.num_recomputed_tokens / (batch * new),
                    "rollbacks": stats.num_rollbacks,
                    "flips": stats.num_rollbacks / max(1, stats.num_accepted_draft_tokens + stats.num_rollbacks),
                }
            )
    return {"found": found, "bits": seen.counts()}
