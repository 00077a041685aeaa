"""Pages and query tiles of attention: what moves bits, and what moves only speed.

    python -m scripts.ablations.pages

Setup      The shipped model; 4 requests of 32 new tokens, three of them after 448 tokens; passes of 4 windows of 16. Medians of
           7 rounds, quartiles in brackets; speed by processor time, over the kernel with pages of 64.
Hardware   Two cores of an Intel Xeon (Sapphire Rapids, AMX), jax 0.10.2, nothing else running. 81 s with all to compile.
Found      Pages move bits. Tiles do nothing to the kernel; those of one row slow down the reference, and move 83 % of its
           tokens on this processor (none on an EPYC). Neighbours move nothing, but 97 % of a request's tokens where the
           reference adds its pages up in 4 parts.

           page                    16                  64                  256
           tokens moved, kernel    89 %                none                75 %
           tokens moved, reference 100 %               none                80 %
           speed, kernel           0.88 (0.87-0.88)    1                   0.97 (0.96-0.97)
           speed, reference        0.26 (0.26-0.26)    0.36 (0.36-0.36)    0.37 (0.36-0.37)
           with tiles of one row   0.11 (0.11-0.11)    0.19 (0.19-0.20)    0.17 (0.17-0.18)
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import detspec as ds
from detspec.bench.bench import bench_prompts
from scripts.ablations.models import model_of
from scripts.ablations.table import Options, Plot, Promise, Row, carry_out
from scripts.ablations.turns import Run, asked, generation, in_turns

FIRST = 40  # tokens of the first prompt
LONG = 480  # positions that each of its three neighbours takes
NEW_TOKENS = {"tiny": 8, "full": 32}
ROUNDS = 7


class Setting(NamedTuple):
    """How attention is cut."""

    attention: str
    page: int = 64
    tile: int = 16
    splits: int = 1

    @property
    def name(self) -> str:
        """Name of the line in the picture."""
        return f"{self.attention}, tile {self.tile}" + (f", {self.splits} splits" if self.splits > 1 else "")


SETTINGS = {
    "tiny": [Setting("cpu"), Setting("cpu", page=16), Setting("reference", page=16, splits=4)],
    "full": [
        *(Setting("cpu", page, tile) for tile in (16, 1) for page in (64, 16, 32, 128, 256)),
        *(Setting("reference", page, tile) for tile in (16, 1) for page in (64, 16, 256)),
        Setting("reference", page=16, splits=4),
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports."""
    plot = Plot("page", "attention", ("moved %", "moved by neighbours %", "speed by cpu time"))
    promise = Promise("moved by neighbours %", lambda row: "splits" in row["attention"])
    return carry_out("pages", measure, __doc__, argv, plot=plot, promise=promise)


def measure(options: Options) -> list[Row]:
    """A row for each setting: speed over that of the first, bits compared with those of the first of the same attention.

    "moved by neighbours" is about the first request, whose neighbours stay as long as it does, or end after one token.
    """
    model = model_of(options)
    own, *others = bench_prompts(model, 4, LONG)

    def run_of(setting: Setting, of_neighbours: int) -> Run:
        numerics = {"page": setting.page, "query_tile": setting.tile, "num_splits": setting.splits}
        schedule = ds.default_schedule(model.cfg).with_numerics(implementation=setting.attention, **numerics)
        new_tokens = (NEW_TOKENS[options.size], *3 * [of_neighbours])
        prompts = [own[:FIRST], *(prompt[: LONG - of_neighbours] for prompt in others)]
        return generation(model, schedule, [asked(options, max_tokens=n) for n in new_tokens], prompts=prompts)

    settings = SETTINGS[options.size]
    found = in_turns({one: run_of(one, NEW_TOKENS[options.size]) for one in settings}, options, rounds=ROUNDS)
    alone = in_turns({one: run_of(one, 1) for one in settings}, options, rounds=1)
    firsts = {one.attention: one for one in reversed(settings)}
    return [
        {
            "attention": one.name,
            "page": one.page,
            **found[one].compared_with(found[settings[0]]),
            "moved %": found[one].moved_from(found[firsts[one.attention]]),
            "moved by neighbours %": alone[one].moved_from(found[one], requests=1),
        }
        for one in settings
    ]


if __name__ == "__main__":
    sys.exit(main())
