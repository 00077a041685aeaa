"""Sums of three variables: the final value of one of them after a series of assignments."""

import dataclasses

import numpy as np

from detspec.errors import InputError
from detspec.train.problems.fillers import Fillers, draw_fillers
from detspec.train.problems.problem import Problem
from detspec.train.problems.words import words_in

VARIABLES = ("a", "b", "c")
UNASKED = "d"
BASE = 10
QUESTIONS = ("last", "first")
STEPS = ("values", "named")
CLOSING = "That's all."  # as many tokens as the question that stands here otherwise


@dataclasses.dataclass(frozen=True)
class Variables(Fillers):
    """ "a = 3; b = 7; c = 1; a = a + b; c = c + a; What's c?": digits, sums modulo 10; steps 3 7 1, 0 7 1, 0 7 1; answer 1.

    A step holds the values of all three variables, since each thought replaces the one before. All operations are equally
    long. No variable is added to itself, so all values stay equally likely. (Doubling would favour even values.) With few
    operations the asked variable often keeps its first value; a model that copies the first value is right that often.
    Fillers assign to a fourth variable, which is never asked for.

    Named steps say what was assigned, and are as long as an operation: "3 7 1;", "a = 0 7 1;". So a chain of thought finds each
    operation at one distance.

    With the question first it reads "What's c? a = 3; b = 7; c = 1; a = a + b; c = c + a; That's all.", with the same steps.
    """

    question: str = "last"  # where the question stands, "last" or "first"
    steps: str = "values"  # what a step says, "values" or "named"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question not in QUESTIONS:
            raise InputError(f"Variables.question must be one of {', '.join(map(repr, QUESTIONS))}, got {self.question!r}")
        if self.steps not in STEPS:
            raise InputError(f"Variables.steps must be one of {', '.join(map(repr, STEPS))}, got {self.steps!r}")

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        words = words_in("What's = + ; ? A:", *VARIABLES, UNASKED, *map(str, range(BASE)))
        return words if self.question == "last" else words_in(*words, CLOSING)

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations after the first three assignments."""
        fillers = draw_fillers(rng, n, self.filler, up_to=self.up_to)
        values = rng.integers(BASE, size=len(VARIABLES)).tolist()
        asked = int(rng.integers(len(VARIABLES)))
        targets = rng.integers(len(VARIABLES), size=n).tolist()
        shifts = rng.integers(1, len(VARIABLES), size=n).tolist()
        ask = f"What's {VARIABLES[asked]}?"
        question = f"{ask} " if self.question == "first" else ""
        question += "; ".join(f"{name} = {value}" for name, value in zip(VARIABLES, values, strict=True))
        steps = [self.step_text("", values)]
        marks = [len(question)]
        for is_filler, target, shift in zip(fillers, targets, shifts, strict=True):
            other = (target + shift) % len(VARIABLES)  # never the target itself
            left = VARIABLES[target]
            right = VARIABLES[other]
            question += f"; {UNASKED if is_filler else left} = {left} + {right}"
            if not is_filler:
                values[target] = (values[target] + values[other]) % BASE
                steps.append(self.step_text(f"{left} = ", values))
                marks.append(len(question))
        question += f"; {CLOSING if self.question == 'first' else ask}"
        return Problem(question, tuple(steps), tuple(marks), str(values[asked]))

    def step_text(self, assigned: str, values: list[int]) -> str:
        """The values as the text of a step: `0 7 1`, or `a = 0 7 1;` after `assigned`."""
        text = " ".join(map(str, values))
        return text if self.steps == "values" else f"{assigned}{text};"
