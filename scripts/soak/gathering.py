"""Who is served together: the requests of a trial, their neighbours, when they arrive and which of them are aborted."""

import dataclasses
import random
from collections.abc import Sequence

import detspec as ds
from scripts.soak.answers import name_of
from scripts.soak.drawing import Way
from scripts.soak.subjects import ordinary

FEW = 7
MOST_NEIGHBOURS = 16
LONGEST_GAP = 3  # steps between two arrivals
LONGEST_LIFE = 12  # steps from an arrival to an abort


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Requests that are served together.

    Attributes:
        requests: all requests, in the order in which they arrive.
        arrivals: number of the step before which each arrives.
        aborts: number of the step before which an id is aborted.
        names: for each sample that is compared, the name of the expected answer.
    """

    requests: list[ds.Request]
    arrivals: list[int]
    aborts: dict[str, int]
    names: dict[str, str]


def drawn_requests(rng: random.Random, composition: str, requests: Sequence[ds.Request]) -> list[ds.Request]:
    """Draws one, a few, half or all of the requests, in their order."""
    number = {"one": 1, "few": rng.randint(2, FEW), "half": len(requests) // 2, "all": len(requests)}[composition]
    return [requests[place] for place in sorted(rng.sample(range(len(requests)), number))]


def gathering(rng: random.Random, way: Way, chosen: Sequence[ds.Request], requests: Sequence[ds.Request]) -> Gathered:
    """The `chosen` requests in the order that `way` says, among neighbours at random places, which are of all `requests`."""
    orders = {"file": list(chosen), "reversed": list(chosen)[::-1], "shuffled": rng.sample(chosen, len(chosen))}
    gathered = orders[way.order]
    names = {name_of(one.id, i): name_of(one.id, i) for one in chosen for i in range(one.sampling.n)}
    neighbours: list[ds.Request] = []
    if way.neighbours != "none":
        sample = rng.sample(requests, rng.randint(1, MOST_NEIGHBOURS))
        neighbours = [dataclasses.replace(one, id=f"next to {one.id}") for one in sample]
        if way.neighbours == "ordinary":
            neighbours = list(map(ordinary, neighbours))
        else:
            names |= {
                name_of(new.id, i): name_of(old.id, i)
                for new, old in zip(neighbours, sample, strict=True)
                for i in range(old.sampling.n)
            }
    for neighbour in neighbours:
        gathered.insert(rng.randint(0, len(gathered)), neighbour)
    arrivals = [0] * len(gathered)
    for place in range(1, len(gathered)) if way.arrival == "between steps" else ():
        arrivals[place] = arrivals[place - 1] + rng.randint(0, LONGEST_GAP)
    aborts = {}
    if way.neighbours == "aborted":
        added = {one.id: when for one, when in zip(gathered, arrivals, strict=True)}
        aborts = {one.id: added[one.id] + rng.randint(1, LONGEST_LIFE) for one in neighbours}
    return Gathered(gathered, arrivals, aborts, names)
