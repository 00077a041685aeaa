"""Coin flips: which side is up after each person has flipped the coin or waited."""

import dataclasses

import numpy as np

from detspec.train.problems.fillers import Fillers, draw_fillers
from detspec.train.problems.names import NAMES
from detspec.train.problems.problem import Problem
from detspec.train.problems.words import words_in

SIDES = ("heads", "tails")
VERBS = ("waits", "flips")  # the index says by how many sides the coin turns
FILLER_VERBS = ("sings", "reads", "naps", "hums")
PEOPLE = NAMES[:20]


@dataclasses.dataclass(frozen=True)
class Parity(Fillers):
    """ "A coin's state is heads. Alice flips, then Bob waits. What's the state?": steps tails, tails; answer tails.

    All operations have the same number of tokens. Given the number of operations and the first state, both answers are
    equally likely: only the operations themselves decide. Fillers do not concern the coin: "Carol sings".
    """

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        return words_in("A coin's state is. What's the state? , then A:", *SIDES, *VERBS, *FILLER_VERBS, *PEOPLE)

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations."""
        fillers = draw_fillers(rng, n, self.filler, up_to=self.up_to)
        side = int(rng.integers(len(SIDES)))
        people, turns, pastimes = (rng.integers(size, size=n) for size in (len(PEOPLE), len(VERBS), len(FILLER_VERBS)))
        question = f"A coin's state is {SIDES[side]}."
        steps = []
        marks = []
        for i, is_filler in enumerate(fillers):
            verb = FILLER_VERBS[pastimes[i]] if is_filler else VERBS[turns[i]]
            question += f"{', then' if i else ''} {PEOPLE[people[i]]} {verb}"
            if not is_filler:
                side = (side + int(turns[i])) % len(SIDES)
                steps.append(SIDES[side])
                marks.append(len(question))
        return Problem(f"{question}. What's the state?", tuple(steps), tuple(marks), SIDES[side])
