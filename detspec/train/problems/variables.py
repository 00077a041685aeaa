"""Sums of three variables: the final value of one of them after a series of assignments."""

import dataclasses

import numpy as np

from detspec.train.problems.fillers import Fillers, draw_fillers
from detspec.train.problems.problem import Problem
from detspec.train.problems.words import words_in

VARIABLES = ("a", "b", "c")
UNASKED = "d"
BASE = 10


@dataclasses.dataclass(frozen=True)
class Variables(Fillers):
    """ "a = 3; b = 7; c = 1; a = a + b; c = c + a; What's c?": digits, sums modulo 10; steps 3 7 1, 0 7 1, 0 7 1; answer 1.

    A step holds the values of all three variables, since each thought replaces the one before. All operations are equally
    long. No variable is added to itself, so all values stay equally likely. (Doubling would favour even values.) With few
    operations the asked variable often keeps its first value; a model that copies the first value is right that often.
    Fillers assign to a fourth variable, which is never asked for.
    """

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        return words_in("What's = + ; ? A:", *VARIABLES, UNASKED, *map(str, range(BASE)))

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations after the first three assignments."""
        fillers = draw_fillers(rng, n, self.filler, up_to=self.up_to)
        values = rng.integers(BASE, size=len(VARIABLES)).tolist()
        asked = int(rng.integers(len(VARIABLES)))
        targets = rng.integers(len(VARIABLES), size=n).tolist()
        shifts = rng.integers(1, len(VARIABLES), size=n).tolist()
        question = "; ".join(f"{name} = {value}" for name, value in zip(VARIABLES, values, strict=True))
        steps = [state_text(values)]
        marks = [len(question)]
        for is_filler, target, shift in zip(fillers, targets, shifts, strict=True):
            other = (target + shift) % len(VARIABLES)  # never the target itself
            left = VARIABLES[target]
            right = VARIABLES[other]
            question += f"; {UNASKED if is_filler else left} = {left} + {right}"
            if not is_filler:
                values[target] = (values[target] + values[other]) % BASE
                steps.append(state_text(values))
                marks.append(len(question))
        return Problem(f"{question}; What's {VARIABLES[asked]}?", tuple(steps), tuple(marks), str(values[asked]))


def state_text(values: list[int]) -> str:
    """The values as the text of a step: `0 7 1`."""
    return " ".join(map(str, values))
