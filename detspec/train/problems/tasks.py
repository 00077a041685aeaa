"""Tasks: frozen dataclasses that draw problems and list their words, such as `Parity(filler=0.8)`.

The three tasks here chain operations: each appends a clause to the question and, unless it is a filler, makes a step.
"""

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from detspec.checkpoint.tokenizer import Tokenizer
from detspec.config import check_choice, is_number
from detspec.errors import InputError
from detspec.train.problems.problem import Clause, Problem, problem_of
from detspec.train.problems.traces import Traces
from detspec.train.problems.words import NAMES, word_tokenizer, words_in

SIDES = ("heads", "tails")
VERBS = ("waits", "flips")  # the index says by how many sides the coin turns
FILLER_VERBS = ("sings", "reads", "naps", "hums")
FLIPPERS = NAMES[:20]

VARIABLES = ("a", "b", "c")
UNASKED = "d"
BASE = 10
CLOSING = "That's all."  # as many tokens as the question that stands here otherwise

GAINS = ("buys", "finds")
LOSSES = ("eats", "loses")
MOST = 9  # apples that a person can have
OWNERS = NAMES[:8]


class Task(Protocol):
    """`Parity`, `Variables`, `Arithmetic`, `TwoHop`, `Traces`, or a class that a config defines."""

    def words(self) -> tuple[str, ...]:
        """All words that the texts use, or none if the task names a tokenizer."""

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations, drawn with `rng` alone; `InputError` if there is none."""


def tokenizer_of(task: Task) -> tokenizers.Tokenizer:
    """The tokenizer for the texts of `task`: made of its words, or read from the folder that `Traces` names."""
    if isinstance(task, Traces):
        return Tokenizer(Path(task.tokenizer_from) / "tokenizer.json").library
    return word_tokenizer(task.words())


@dataclasses.dataclass(frozen=True)
class Fillers:
    """How many operations are fillers, which do not change the answer: with many of them, non-trivial thoughts are rare.

    Raises `InputError` for values out of range.
    """

    # share of the operations, in [0, 1), that make no step; rounded to whole operations, of which at least one makes a step
    filler: float = 0.0
    up_to: bool = False  # each problem draws its own share, between 0 and `filler`

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not is_number(self.filler) or not 0 <= self.filler < 1:
            raise InputError(f"{name}.filler must be a number in [0, 1), got {self.filler!r}")
        if not isinstance(self.up_to, bool):
            raise InputError(f"{name}.up_to must be True or False, got {self.up_to!r}: the share itself is {name}.filler")

    def draw_fillers(self, rng: np.random.Generator, n: int) -> list[bool]:
        """Which of `n` operations are fillers: their share, but never all; `InputError` unless `n` is at least 1.

        The number of fillers is fixed, not drawn for each operation: otherwise short problems would often consist of fillers
        alone, and their answers would need no thought.
        """
        require_operations(n)
        share = rng.uniform(0, self.filler) if self.up_to else self.filler
        return (rng.permutation(n) < min(round(share * n), n - 1)).tolist()


def require_operations(n: object) -> None:
    """Raises `InputError` unless `n` is a positive integer."""
    if not isinstance(n, int | np.integer) or n < 1:
        raise InputError(f"a problem needs a positive number of operations, got {n!r}")


@dataclasses.dataclass(frozen=True)
class Parity(Fillers):
    """ "A coin's state is heads. Alice flips, then Bob waits. What's the state?": steps tails, tails; answer tails.

    All operations have the same number of tokens. Given the number of operations and the first state, both answers are
    equally likely: only the operations themselves decide. Fillers do not concern the coin: "Carol sings".
    """

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        return words_in("A coin's state is. What's the state? , then A:", *SIDES, *VERBS, *FILLER_VERBS, *FLIPPERS)

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations."""
        fillers = self.draw_fillers(rng, n)
        side = int(rng.integers(len(SIDES)))
        people, turns, pastimes = (rng.integers(len(words), size=n) for words in (FLIPPERS, VERBS, FILLER_VERBS))
        clauses: list[Clause] = [(f"A coin's state is {SIDES[side]}.", None)]
        for i, is_filler in enumerate(fillers):
            side = side if is_filler else (side + int(turns[i])) % len(SIDES)
            verb = FILLER_VERBS[pastimes[i]] if is_filler else VERBS[turns[i]]
            clauses.append((f"{', then' if i else ''} {FLIPPERS[people[i]]} {verb}", None if is_filler else SIDES[side]))
        return problem_of(clauses, ". What's the state?", SIDES[side])


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

    question: str = "last"  # place of the question, "last" or "first"
    steps: str = "values"  # form of a step, "values" or "named"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "question", ("last", "first"))
        check_choice(self, "steps", ("values", "named"))

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        words = words_in("What's = + ; ? A:", *VARIABLES, UNASKED, *map(str, range(BASE)))
        return words if self.question == "last" else words_in(*words, CLOSING)

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations after the first three assignments."""
        fillers = self.draw_fillers(rng, n)
        values = rng.integers(BASE, size=len(VARIABLES)).tolist()
        asked = int(rng.integers(len(VARIABLES)))
        ask = f"What's {VARIABLES[asked]}?"
        targets = rng.integers(len(VARIABLES), size=n).tolist()
        shifts = rng.integers(1, len(VARIABLES), size=n).tolist()
        opening = "; ".join(f"{name} = {value}" for name, value in zip(VARIABLES, values, strict=True))
        is_first = self.question == "first"
        clauses: list[Clause] = [(f"{ask} {opening}" if is_first else opening, self.step_text("", values))]
        for is_filler, target, shift in zip(fillers, targets, shifts, strict=True):
            other = (target + shift) % len(VARIABLES)  # never the target itself
            left = VARIABLES[target]
            step = None
            if not is_filler:
                values[target] = (values[target] + values[other]) % BASE
                step = self.step_text(f"{left} = ", values)
            clauses.append((f"; {UNASKED if is_filler else left} = {left} + {VARIABLES[other]}", step))
        return problem_of(clauses, f"; {CLOSING if is_first else ask}", str(values[asked]))

    def step_text(self, assigned: str, values: list[int]) -> str:
        """The values as the text of a step: `0 7 1`, or `a = 0 7 1;` after `assigned`."""
        text = " ".join(map(str, values))
        return text if self.steps == "values" else f"{assigned}{text};"


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """ "Alice has 3 apples. Alice buys 4. Alice loses 2. How many has Alice?": steps + 4 = 7, - 2 = 5; answer 5.

    Numbers are single words from 0 to 9, and no operation leads out of them. An operation and its step are equally long: so a
    chain of thought finds each operation at one distance. The last one bounds the answer: who buys 4 has at least 4.
    """

    def words(self) -> tuple[str, ...]:
        """All words that the texts use."""
        return words_in("has apples. How many ? A: + - =", *GAINS, *LOSSES, *OWNERS, *map(str, range(MOST + 1)))

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations."""
        require_operations(n)
        who = OWNERS[int(rng.integers(len(OWNERS)))]
        held = int(rng.integers(MOST + 1))
        clauses: list[Clause] = [(f"{who} has {held} apples", None)]
        for _ in range(n):
            after = int(rng.integers(MOST))
            after += after >= held  # any other number, all equally likely
            verbs, sign = (GAINS, "+") if after > held else (LOSSES, "-")
            amount = abs(after - held)
            clauses.append((f". {who} {verbs[int(rng.integers(len(verbs)))]} {amount}", f"{sign} {amount} = {after}"))
            held = after
        return problem_of(clauses, f". How many has {who}?", str(held))
