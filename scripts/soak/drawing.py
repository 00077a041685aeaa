"""What a trial draws: a value for each axis that must not matter."""

import dataclasses
import random
from typing import Any

from scripts.soak.subjects import RANDOM, SHIPPED, TIED

MODELS = {SHIPPED: 0.2, RANDOM: 0.5, TIED: 0.3}
METHODS = ("none", "none", "ngram", "self", "int8", "draft_model", ("none", "ngram", "int8"), "auto")
METHODS_ON_CHIPS = ("none", "ngram", "self")
NUM_SHAPES = 24  # each needs programs of its own, which take longer to make than a trial


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides which programs an engine needs, and what it is told when it is made.

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
    """What a trial draws besides, at no cost of compiling.

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


def draw_shapes(rng: random.Random) -> list[Shape]:
    """The shapes that trials choose from; each model is among them, and each number of chips."""
    return [_draw_shape(rng, index) for index in range(NUM_SHAPES)]


def _draw_shape(rng: random.Random, index: int) -> Shape:
    [model] = rng.choices(list(MODELS), list(MODELS.values()))
    chips = {2: 2, 3: 4}.get(index % 8, 1)
    if chips > 1 and model == SHIPPED:
        model = RANDOM
    return Shape(
        model=model,
        chips=chips,
        max_requests=rng.choice((1, 3, 8, 8, 32)),
        method=rng.choice(METHODS if chips == 1 else METHODS_ON_CHIPS),
        most_drafted=rng.choice((3, 7, 15)),
        window=rng.choice((4, 8, 16)),
        few_pages=rng.random() < 0.3,
        prefill_passes=rng.choice((1, 4)),
        segment_steps=rng.choice((None, None, 1, 5)),
    )


def draw_way(rng: random.Random) -> Way:
    """One way to use an engine."""
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
