"""How the row budget of a pass is cut, against recomputed tokens and speed: G windows of W tokens a pass.

    python -m scripts.ablations.budget

Setup      The shipped model; 4 requests of 96 new tokens at temperature 1, drafted by the same weights in int8. Medians of 15
           rounds, quartiles in brackets; speed by processor time, over one row a request without a draft.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids, AMX), jax 0.10.2, nothing else running. 41 s with all to compile.
Found      No cut moves a bit; unverified drafts move 39 % of tokens. Nothing is recomputed, and most is fast, without a draft,
           if barely: matrix tiles make rows cheap, but the drafts take time, too. Recomputed tokens follow W alone.

           W                   2          4          8          16         32         64
           recomputed, %       0.8        2.3        7.0        16         32         72
                               (0.7-1.0)  (2.0-3.4)  (5.6-9.4)  (12-20)    (24-43)    (45-82)
           speed, G = 1        0.50       0.65       0.75       0.75       0.60       0.39
           speed, G = 4        0.98       0.95       0.93       0.81       0.61       0.37     each +- 0.11 at most
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import detspec as ds
from scripts.ablations.models import model_of
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out
from scripts.ablations.turns import Run, asked, generation, in_turns

REQUESTS = 4
WINDOWS = {"tiny": (4,), "full": (2, 4, 8, 16, 32, 64)}
GROUPS = {"tiny": (4,), "full": (1, 4)}


class Cut(NamedTuple):
    """How passes are cut, what drafts, and whether they verify it."""

    window: int
    groups: int = REQUESTS
    draft: str = "int8"
    verified: bool = True

    @property
    def name(self) -> str:
        """Name of the line in the picture."""
        return f"{self.draft}, {f'G = {self.groups}' if self.verified else 'unverified'}"


PLAIN = Cut(1, draft="none")
CONTROL = Cut(4, draft="self", verified=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("window", "draft", ("recomputed %", "tokens a pass", "speed by cpu time"))
    promise = Promise("moved %", lambda row: row["draft"] == CONTROL.name)
    return carry_out("budget", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each cut, compared with a pass of one row for each request, which needs no draft."""
    model = model_of(options)

    def run_of(cut: Cut) -> Run:
        schedule = ds.default_schedule(model.cfg).with_budget(cut.groups * cut.window, cut.window)
        sampling = asked(options, temperature=1.0, deterministic=cut.verified)
        return generation(model, schedule, [sampling] * REQUESTS, draft=cut.draft)

    cuts = [Cut(window, groups) for groups in GROUPS[options.size] for window in WINDOWS[options.size]]
    found = in_turns({cut: run_of(cut) for cut in [PLAIN, *cuts, CONTROL]}, options)
    return [
        {
            "draft": cut.name,
            "window": cut.window,
            "tokens a pass": own.ratio("num_tokens", "num_verify_passes"),
            "recomputed %": own.percent("num_recomputed_tokens", "num_tokens"),
            **own.compared_with(found[PLAIN]),
        }
        for cut, own in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
