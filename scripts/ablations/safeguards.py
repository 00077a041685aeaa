"""Cost of each safeguard of a canonical pass, and whether bits depend on the batch without it.

    python -m scripts.ablations.safeguards

Setup      The shipped model; 1, 8 and 64 requests of 96 new tokens, greedy, no drafts. Medians of 15 rounds, quartiles in
           brackets; speed by processor time, over the same requests with all safeguards on.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids, AMX), jax 0.10.2, nothing else running. 80 s with all to compile.
Found      Sums of a fixed order cost nothing, and bits depend on the batch without them. XLA's products do not depend on it
           here; elsewhere they may. A fixed shape keeps bits without either, but pays for 64 rows whatever the batch is.

           requests            speed at 1          8                   64                  moved, 1 and 8 against 64
           native sums         0.99 (0.96-1.00)    0.99 (0.97-1.00)    1.02 (1.02-1.03)    58 %, 36 %
           XLA's products      0.67 (0.66-0.68)    0.76 (0.75-0.77)    0.92 (0.91-0.92)    none
           both off            0.67 (0.66-0.68)    0.76 (0.75-0.77)    0.94 (0.94-0.95)    58 %, 36 %
           both off, 64 rows   0.31 (0.30-0.31)    0.37 (0.37-0.38)    0.95 (0.94-0.96)    none
           unverified          1.11 (1.07-1.11)    1.08 (1.07-1.09)    1.04 (1.03-1.07)    58 %, 21 %
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import detspec as ds
from detspec.bench.bench import bench_prompts
from scripts.ablations.models import model_of
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out
from scripts.ablations.turns import PROMPT_LEN, Run, asked, generation, in_turns

ROWS = 64  # of a pass whose shape does not follow the batch
BATCHES = {"tiny": (4, 64), "full": (1, 8, 64)}
OFF: dict[str, dict[str, Any]] = {
    "all on": {},
    "native sums": {"reductions": "native"},
    "XLA's products": {"linear": "xla"},
    "both off": {"reductions": "native", "linear": "xla"},
}
SETTINGS = {"tiny": ("all on", "native sums"), "full": (*OFF, "both off, 64 rows", "all on, 64 rows", "unverified")}
KEPT = ("all on", "all on, 64 rows", "both off, 64 rows")  # a fixed shape is a safeguard, too


class Setting(NamedTuple):
    """The safeguard that is off, and the number of requests."""

    name: str
    batch: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("requests", "setting", ("moved by the batch %", "speed by cpu time"))
    promise = Promise("moved by the batch %", lambda row: row["setting"] not in KEPT)
    return carry_out("safeguards", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each setting: compared with all safeguards on, and bits with those of the same setting in the largest batch."""
    model = model_of(options)
    batches = BATCHES[options.size]
    prompts = bench_prompts(model, max(batches), PROMPT_LEN)

    def run_of(setting: Setting) -> Run:
        name, _, is_fixed = setting.name.partition(", ")
        verified = name != "unverified"
        window = 1 if verified else 8
        schedule = ds.default_schedule(model.cfg).with_numerics(**OFF.get(name, {}))
        schedule = schedule.with_budget(ROWS if is_fixed else setting.batch * window, window)
        sampling = [asked(options, deterministic=verified)] * setting.batch
        own = prompts[: setting.batch]  # the same ones in each round
        return generation(model, schedule, sampling, draft="none" if verified else "self", prompts=own)

    settings = [Setting(name, batch) for name in SETTINGS[options.size] for batch in batches]
    found = in_turns({one: run_of(one) for one in settings}, options)
    return [
        {
            "setting": one.name,
            "requests": one.batch,
            **own.compared_with(found[one._replace(name="all on")]),
            "moved by the batch %": own.moved_from(found[one._replace(batch=max(batches))]),
        }
        for one, own in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
