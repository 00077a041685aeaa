"""Questions about people whose facts a model has memorised: about one fact, or about two facts joined by a person."""

import dataclasses
import functools

import numpy as np

from detspec.config import check_choice, is_count
from detspec.errors import InputError
from detspec.train.corpus import is_heldout
from detspec.train.experiment import require_seed
from detspec.train.problems.problem import Problem, problem_of
from detspec.train.problems.words import NAMES, words_in

RELATIONS = ("friend", "boss", "teacher", "doctor", "neighbour", "rival", "coach", "tailor")


@dataclasses.dataclass(frozen=True)
class TwoHop:
    """A world in which each person has one friend, one boss and so on: its facts, and questions that join two of them.

    one hop    "Ann's friend has a name. What's the name?"    step Bob   answer Bob
    two hops   "Ann's friend has a boss. Who's the boss?"     step Bob   answer: Bob's boss

    The step follows from the words "Ann's friend" alone. Each person is the friend of exactly one person, so all answers are
    equally frequent. All questions are equally long. The two relations of a question differ: Ann's friend's friend could be
    Ann.

    Held out are single questions of two hops; or all of those that begin with some people, whose facts training still asks for
    in one hop; or all questions that begin with them, so that a model must know their facts before.
    """

    seed: int = 0  # decides the facts, such as which person is whose boss
    num_people: int = 40  # number of people, at most that of `NAMES`
    num_relations: int = 6  # number of relations, at most that of `RELATIONS`
    heldout_one_in: int = 10  # a question is held out when a SHA-256 of what it is held out by is a multiple of this
    split: str = "train"  # which questions are drawn, "train" or "heldout"; facts are the same in both
    # "question": two hops, by person and relations; "start": two hops, by person; "person": two hops and one, by person
    heldout_by: str = "question"

    def __post_init__(self) -> None:
        accepted = {"num_people": (3, len(NAMES)), "num_relations": (2, len(RELATIONS)), "heldout_one_in": (2, 10**6)}
        for field, (least, most) in accepted.items():
            value = getattr(self, field)
            if not is_count(value) or not least <= value <= most:
                raise InputError(f"TwoHop.{field} must be an integer from {least} to {most}, got {value!r}")
        require_seed(self)
        check_choice(self, "split", ("train", "heldout"))
        check_choice(self, "heldout_by", ("question", "start", "person"))

    def words(self) -> tuple[str, ...]:
        """All words that the texts use; they depend on the numbers of people and relations alone."""
        people = NAMES[: self.num_people]
        relations = RELATIONS[: self.num_relations]
        return words_in("'s has a name. What's the name? Who's A:", *relations, *people)

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` hops, 1 or 2, of those that belong to the split; all are equally likely."""
        if n not in (1, 2):
            raise InputError(f"TwoHop draws problems of 1 or 2 hops, got {n!r}")
        problems = self.one_hop if n == 1 else self.two_hop
        if not problems:
            hops = "one hop" if n == 1 else "two hops"
            raise InputError(f"{self} has no {hops}: take a smaller heldout_one_in or more people")
        return problems[int(rng.integers(len(problems)))]

    @functools.cached_property
    def world(self) -> dict[str, dict[str, str]]:
        """The facts by relation and person: `world["boss"]["Ann"]` is Ann's boss."""
        people = NAMES[: self.num_people]
        world = {}
        for i, relation in enumerate(RELATIONS[: self.num_relations]):
            order = derangement(np.random.default_rng((self.seed, i)), self.num_people)
            world[relation] = {person: people[order[j]] for j, person in enumerate(people)}
        return world

    @functools.cached_property
    def one_hop(self) -> tuple[Problem, ...]:
        """A problem for every fact; held out by person, for every fact about the people of the split."""
        return tuple(
            problem(person, relation, bridge, "has a name. What's the name?", bridge)
            for relation, facts in self.world.items()
            for person, bridge in facts.items()
            if self.heldout_by != "person" or self.is_heldout(person, relation, "") == (self.split == "heldout")
        )

    @functools.cached_property
    def two_hop(self) -> tuple[Problem, ...]:
        """A problem for every two facts of the split that join."""
        return tuple(
            problem(person, first, bridge, f"has a {second}. Who's the {second}?", facts[bridge])
            for first, bridges in self.world.items()
            for second, facts in self.world.items()
            for person, bridge in bridges.items()
            if first != second and self.is_heldout(person, first, second) == (self.split == "heldout")
        )

    def is_heldout(self, person: str, first: str, second: str) -> bool:
        """Whether the two hops from `person` are held out of training; `split` does not change it."""
        by = f"{self.seed} {person} {first} {second}" if self.heldout_by == "question" else f"{self.seed} {person}"
        return is_heldout(by, self.heldout_one_in)


def problem(person: str, relation: str, bridge: str, rest: str, answer: str) -> Problem:
    """A question whose first two words determine `bridge`."""
    return problem_of([(f"{person}'s {relation}", bridge)], f" {rest}", answer)


def derangement(rng: np.random.Generator, size: int) -> np.ndarray:
    """A random permutation without fixed points; about one in three permutations is one."""
    while True:
        order = rng.permutation(size)
        if (order != np.arange(size)).all():
            return order
