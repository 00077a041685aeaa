"""Word problems from a template: how many apples a person has after buying, finding, eating and losing some."""

import dataclasses

import numpy as np

from detspec.config import is_count
from detspec.errors import InputError
from detspec.train.problems.names import NAMES
from detspec.train.problems.problem import Problem
from detspec.train.problems.words import words_in

PEOPLE = NAMES[:8]
GAINS = ("buys", "finds")
LOSSES = ("eats", "loses")
MOST = 9  # apples that a person can have


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """ "Alice has 3 apples. Alice buys 4. Alice loses 2. How many has Alice?": steps + 4 = 7, - 2 = 5; answer 5.

    Numbers are single words from 0 to 9, and no operation leads out of them. An operation and its step are equally long: so a
    chain of thought finds each operation at one distance. The last one bounds the answer: who buys 4 has at least 4.
    """

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        return words_in("has apples. How many ? A: + - =", *GAINS, *LOSSES, *PEOPLE, *map(str, range(MOST + 1)))

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations."""
        if not is_count(n):
            raise InputError(f"a problem needs a positive number of operations, got {n!r}")
        who = PEOPLE[int(rng.integers(len(PEOPLE)))]
        held = int(rng.integers(MOST + 1))
        question = f"{who} has {held} apples"
        steps = []
        marks = []
        for _ in range(n):
            after = int(rng.integers(MOST))
            after += after >= held  # any other number, all equally likely
            verbs, sign = (GAINS, "+") if after > held else (LOSSES, "-")
            amount = abs(after - held)
            question += f". {who} {verbs[int(rng.integers(len(verbs)))]} {amount}"
            held = after
            steps.append(f"{sign} {amount} = {held}")
            marks.append(len(question))
        return Problem(f"{question}. How many has {who}?", tuple(steps), tuple(marks), str(held))
