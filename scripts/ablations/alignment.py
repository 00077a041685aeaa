"""Windows that begin anywhere ("free") or at multiples of their length ("window"): speed, and whether bits follow.

python -m scripts.ablations.alignment
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import detspec as ds
from scripts.ablations.models import model_of
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out
from scripts.ablations.turns import Run, asked, generation, in_turns

REQUESTS = 4
WINDOWS = {"tiny": (4,), "full": (4, 8, 16, 32)}


class Setting(NamedTuple):
    """Where windows begin, how long they are, what drafts, and whether passes verify it."""

    alignment: str
    window: int
    draft: str = "int8"
    verified: bool = True


PLAIN = Setting("free", 1, draft="none")
CONTROL = Setting("free", 4, draft="self", verified=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("window", "alignment", ("tokens a pass", "recomputed %", "speed by cpu time"))
    promise = Promise("moved %", lambda row: row["alignment"] == "unverified")
    return carry_out("alignment", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each setting, compared with a pass of one row for each request, which needs no draft."""
    model = model_of(options)

    def run_of(setting: Setting) -> Run:
        schedule = ds.default_schedule(model.cfg).with_numerics(alignment=setting.alignment)
        schedule = schedule.with_budget(REQUESTS * setting.window, setting.window)
        sampling = asked(options, temperature=1.0, deterministic=setting.verified)
        return generation(model, schedule, [sampling] * REQUESTS, draft=setting.draft)

    settings = [Setting(alignment, window) for alignment in ("free", "window") for window in WINDOWS[options.size]]
    found = in_turns({setting: run_of(setting) for setting in [PLAIN, *settings, CONTROL]}, options)
    return [
        {
            "alignment": setting.alignment if setting.verified else "unverified",
            "window": setting.window,
            "draft": setting.draft,
            "tokens a pass": own.ratio("num_tokens", "num_verify_passes"),
            "recomputed %": own.percent("num_recomputed_tokens", "num_tokens"),
            **own.compared_with(found[PLAIN]),
        }
        for setting, own in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
