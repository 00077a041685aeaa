"""Predictions for devices that are not here, from bytes, FLOP and data sheets; nothing is run or compiled."""

from collections.abc import Sequence
from typing import Any

from detspec.model.params import pass_work
from detspec.planning.planning import predict
from detspec.presets import preset
from detspec.schedule import Schedule
from detspec.targets import Target, canonical_schedule, target

MODEL = "llama3_1_8b"
CONTEXT = 512
WINDOW = 16
# Devices and how many of them share the model: it does not fit one v5e. What chips send each other is left out.
DEVICES = {"v5e, 4 chips": ("v5e:2x2", 4), "v6e": ("v6e:2x2", 1), "H200": ("h200", 1)}


def predictions(
    *, rows: Sequence[int], batch: int, windows: Sequence[int], groups: Sequence[int], max_rows: int
) -> dict[str, Any]:
    """By device: the seconds of a pass by rows, and the speed over ordinary decoding by window and group."""
    return {name: _on(target(of), chips, rows, batch, windows, groups, max_rows) for name, (of, chips) in DEVICES.items()}


def _on(
    device: Target, chips: int, rows: Sequence[int], batch: int, windows: Sequence[int], groups: Sequence[int], max_rows: int
) -> dict[str, Any]:
    cfg = preset(MODEL)
    own = canonical_schedule(device, cfg)

    def seconds(schedule: Schedule, windows: int) -> float:
        return pass_work(cfg, schedule, windows=windows, context=CONTEXT, chips=chips).seconds(device)

    budgets = [own.with_budget(number, min(number, WINDOW)) for number in rows]
    speeds = []
    for window in windows:
        for group in groups:
            if window * group <= max_rows:
                found = predict(
                    cfg,
                    device,
                    schedule=own.with_budget(window * group, window),
                    live=batch,
                    context=CONTEXT,
                    seconds_fn=seconds,
                )["predicted"]
                ratio = found["drafting_tok_per_s"] / found["ordinary_tok_per_s"]
                speeds.append({"window": window, "groups": group, "ratio": ratio})
    return {
        "passes": [{"rows": budget.budget.rows, "ms": 1e3 * seconds(budget, budget.budget.groups)} for budget in budgets],
        "speeds": speeds,
    }
