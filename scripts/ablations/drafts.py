"""Draft sources by temperature: how many drafts are accepted, and what that is worth for one request.

    python -m scripts.ablations.drafts

Setup      The shipped model; 1 request of 96 new tokens, another prompt in each of 15 rounds, windows of 8. Medians, quartiles
           in brackets; speed by processor time, over no draft. Every draft is verified; an engine skips those that do not pay.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids, AMX), jax 0.10.2, nothing else running. 20 s with all to compile.
Found      No source moves a bit; unverified tokens differ in 55 to 74 %. Temperature is no matter to drafts that run the model,
           since they draw the noise of the pass. Prompt lookup lives on repetition, and sampled texts repeat little. All
           sources but lookup of sampled texts are faster than none: matrix tiles make rows of a pass cheap.

           accepted, %    T = 0         T = 0.8       T = 1           speed    T = 0             T = 0.8            T = 1
           self           100           100           100                      1.12              1.12               1.12
           int8           100 (96-100)  95 (93-98)    93 (91-98)               1.47              1.45               1.43
           ngram          64 (53-81)    19 (10-30)    10 (2-18)                2.01 (1.79-2.93)  1.09 (0.97-1.19)   0.95
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import detspec as ds
from scripts.ablations.models import model_of
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out
from scripts.ablations.turns import Run, asked, generation, in_turns

REQUESTS = {"tiny": 4, "full": 1}  # a test takes programs of other ablations
WINDOW = {"tiny": 4, "full": 8}
DRAFTS = {"tiny": ("none", "ngram", "int8"), "full": ("none", "ngram", "self", "int8")}
TEMPERATURES = {"tiny": (0.0, 1.0), "full": (0.0, 0.8, 1.0)}


class Setting(NamedTuple):
    """A draft source, a temperature, and whether passes verify drafts."""

    draft: str
    temperature: float
    verified: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("temperature", "draft", ("accepted %", "tokens a pass", "speed by cpu time"))
    promise = Promise("moved %", lambda row: row["draft"] == "unverified")
    return carry_out("drafts", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each source and temperature, compared with no draft at the same temperature."""
    model = model_of(options)
    requests = REQUESTS[options.size]

    def run_of(setting: Setting) -> Run:
        window = 1 if setting.draft == "none" else WINDOW[options.size]
        schedule = ds.default_schedule(model.cfg).with_budget(requests * window, window)
        sampling = asked(options, temperature=setting.temperature, deterministic=setting.verified)
        return generation(model, schedule, [sampling] * requests, draft=setting.draft)

    temperatures = TEMPERATURES[options.size]
    settings = [Setting(draft, t) for t in temperatures for draft in DRAFTS[options.size]]
    settings += [Setting("self", t, verified=False) for t in temperatures]
    found = in_turns({setting: run_of(setting) for setting in settings}, options)
    return [
        {
            "draft": setting.draft if setting.verified else "unverified",
            "temperature": setting.temperature,
            "accepted %": own.percent("num_accepted_draft_tokens", "num_draft_tokens"),
            "tokens a pass": own.ratio("num_tokens", "num_verify_passes"),
            **own.compared_with(found[Setting("none", setting.temperature)]),
        }
        for setting, own in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
