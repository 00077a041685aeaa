"""Windows that begin anywhere ("free") or at multiples of their length ("window"): speed, and whether bits follow.

    python -m scripts.ablations.alignment

Setup      The shipped model; 4 requests of 96 new tokens at temperature 1, drafted by the same weights in int8. Medians of 15
           rounds, quartiles in brackets; speed by processor time, over one row a request without a draft.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids, AMX), jax 0.10.2, nothing else running. 37 s with all to compile.
Found      No bit moves, and none between windows of other lengths: this device needs no alignment. Unverified drafts move 39 %
           of tokens. What an aligned window reads again leaves less room for drafts.

           W                       4                   8                   16                  32
           tokens a pass, free     3.8                 7.3 (7.1-7.4)       12.8 (12.4-13.7)    21.3 (20.2-22.6)
           aligned                 3.7                 6.5 (6.4-6.9)       11.0 (10.8-11.1)    16.7 (16.0-17.5)
           speed, free             0.99 (0.97-1.02)    0.94 (0.91-0.97)    0.86 (0.76-0.88)    0.60 (0.56-0.72)
           aligned                 0.93 (0.92-0.96)    0.82 (0.79-0.88)    0.69 (0.64-0.72)    0.52 (0.49-0.53)
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
    """Start and length of windows, the draft source, and whether passes verify it."""

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
