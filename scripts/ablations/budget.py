"""How the row budget of a pass is cut, against recomputed tokens and speed: G windows of W tokens a pass.

    python -m scripts.ablations.budget

Setup      The shipped model; 4 requests of 96 new tokens at temperature 1, drafted by the same weights in int8. Medians of 15
           rounds, quartiles in brackets; speed by processor time, over one row a request without a draft.
Hardware   Two shared cores of an AMD EPYC (Zen 4), jax 0.10.2. 44 s of processor time, 97 s with all to compile; 68 s by the
           clock, next to other work.
Found      No cut moves a bit; unverified drafts move 36 % of tokens. Nothing is recomputed, and most is fast, without a draft:
           the weights lie in the processor's cache, so rows cost arithmetic. Recomputed tokens follow W alone.

           W                   2          4          8          16         32         64
           recomputed, %       0.8        2.3        6.0        13         31         57
                               (0.8-1.0)  (1.8-3.0)  (4.0-8.1)  (12-18)    (22-37)    (45-80)
           speed, G = 1        0.50       0.55       0.52       0.50       0.40       0.27
           speed, G = 4        0.71       0.65       0.57       0.49       0.40       0.26     each +- 0.06 at most
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
        """What its line in the picture is called."""
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
