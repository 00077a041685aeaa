"""Panel 9: speed by the windows' length and their number in a pass, with the model's own fast path as draft."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from detspec.engine.policy import Needs
from detspec.environment import default_schedule
from scripts.replications.llm42.traffic import BOTH, Lengths, Seen, Shape, engine_of, mixed, model_of, play, requests_of


def speeds(
    *, shape: Shape, batch: int, lengths: Lengths, windows: Sequence[int], groups: Sequence[int], max_rows: int, repeats: int
) -> dict[str, Any]:
    """Speed over ordinary generation for each window and group of at most `max_rows` rows, in turn; all deterministic.

    "no_drafts" is deterministic decoding of one row each, which is what runs by default where drafts cannot win.
    """
    model = model_of(shape)
    own = default_schedule(model.cfg)
    room = {"max_requests": batch, "max_len": sum(lengths)}
    plain = engine_of(model, **room)
    plain.prepare(batch, BOTH)
    ordinary = requests_of(model, [lengths] * batch)
    asked = mixed(ordinary, 100)
    engines = {}
    for window in windows:
        for group in groups:
            if window * group <= max_rows and group <= batch:
                engines[window, group] = engine_of(
                    model,
                    method="self",
                    num_speculative_tokens=window - 1,
                    schedule=own.with_budget(window * group, window),
                    **room,
                )
                engines[window, group].prepare(batch, Needs(deterministic=True, ordinary=False, processing=False))
    seen = Seen()
    ratios: dict[tuple[int, int], list[float]] = {cell: [] for cell in engines}
    no_drafts = []
    for _ in range(repeats):
        base = play(plain, ordinary)
        seen.add_all(ordinary, base, str(own.budget.rows))
        canonical = play(plain, asked)
        seen.add_all(asked, canonical, str(own.budget.rows))
        no_drafts.append(base.seconds / canonical.seconds)
        for (window, group), engine in engines.items():
            played = play(engine, asked)
            seen.add_all(asked, played, str(window * group))
            ratios[window, group].append(base.seconds / played.seconds)
    return {
        "found": [{"window": window, "groups": group, "ratio": median(each)} for (window, group), each in ratios.items()],
        "no_drafts": median(no_drafts),
        "bits": seen.counts(),
    }
