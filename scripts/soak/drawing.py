"""Values that a trial draws: one for each axis that must not matter."""

import dataclasses
import random
from typing import Any

from scripts.soak.sizes import Size
from scripts.soak.subjects import RANDOM, SHIPPED, TIED

METHODS_ON_CHIPS = ("none", "ngram", "self")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Arguments of an engine, which decide the programs that it needs.

    Attributes:
        model: name of the subject.
        chips: simulated chips that the model is cut over.
        max_requests: most requests in flight.
        method: draft source, or several.
        most_drafted: most drafted tokens of a sequence in a step.
        window: positions of a window of the row budget, by which prompts are cut into chunks, too.
        few_pages: whether pages are too few for all requests at once, so that some are preempted.
        prefill_passes: most passes over prompts between two steps.
        segment_steps: most tokens that a sequence gains between two looks of the host; None for the engine's choice.
    """

    model: str
    chips: int
    max_requests: int
    method: str | tuple[str, ...]
    most_drafted: int
    window: int
    few_pages: bool
    prefill_passes: int
    segment_steps: int | None


@dataclasses.dataclass(frozen=True)
class Way:
    """Further values of a trial, at no cost of compiling.

    Attributes:
        composition: number of requests, all of the subject's or fewer.
        order: order in which they are added.
        arrival: whether all come at once, or between steps.
        prefixes: whether requests share pages of their prompts: "off"; "cold" for an empty cache; "warm" for one with what
            trials before have left.
        neighbours: what else is in the batch: "none", "ordinary" requests, or requests that are "aborted".
        clocks: "right", or "jump".
        asked: "generated" or "streamed".
        checked: what is done with the answers: "no", "scored", "read as prompts" or "audited".
        weights: "kept"; or "there and back": others are used in between.
        programs: "kept", or "compiled anew".
    """

    composition: str
    order: str
    arrival: str
    prefixes: str
    neighbours: str
    clocks: str
    asked: str
    checked: str
    weights: str
    programs: str


def draw_shapes(rng: random.Random, size: Size) -> list[Shape]:
    """The shapes that trials choose from: each value of an axis is about as often among them as the others."""

    def column(*values: Any) -> list[Any]:
        repeated = list(values) * -(-size.num_shapes // len(values))
        return rng.sample(repeated[: size.num_shapes], size.num_shapes)

    columns = {
        "model": column(RANDOM, SHIPPED if size.with_shipped else RANDOM, TIED),
        "chips": column(1, 2, 1, 4, 1, 1),
        "max_requests": column(8, 32, 1, 3),
        "method": column("none", "ngram", "self", "int8", "draft_model", ("none", "ngram", "int8"), "auto"),
        "most_drafted": column(3, 7, 15),
        "window": column(4, 8, 16),
        "few_pages": column(False, True),
        "prefill_passes": column(1, 4),
        "segment_steps": column(None, 1, None, 5),
    }
    return [_possible(*row) for row in zip(*columns.values(), strict=True)]


def _possible(model: str, chips: int, max_requests: int, method: str | tuple[str, ...], *others: Any) -> Shape:
    """A shape; the shipped model stays on one chip, and several chips have no drafts of another model or in int8."""
    on_one = model == SHIPPED or method not in METHODS_ON_CHIPS
    return Shape(model, 1 if on_one else chips, max_requests, method, *others)


def draw_way(rng: random.Random) -> Way:
    """Draws a way to use an engine."""
    return Way(
        composition=rng.choice(("one", "few", "half", "all", "all")),
        order=rng.choice(("file", "reversed", "shuffled")),
        arrival=rng.choice(("at once", "between steps")),
        prefixes=rng.choice(("off", "cold", "warm")),
        neighbours=rng.choice(("none", "ordinary", "aborted")),
        clocks=rng.choice(("right", "right", "jump")),
        asked=rng.choice(("generated", "generated", "streamed")),
        checked=rng.choice(("no", "scored", "read as prompts", "audited")),
        weights="there and back" if rng.random() < 0.1 else "kept",
        programs="compiled anew" if rng.random() < 0.01 else "kept",
    )


def facts_of(drawn: Shape | Way) -> dict[str, Any]:
    """The drawn values, as they are written down."""
    values = dataclasses.asdict(drawn)
    return {name: "+".join(value) if isinstance(value, tuple) else value for name, value in values.items()}
