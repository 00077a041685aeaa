"""Tasks for reinforcement learning: prompts, and the reward of a text. A config may define others."""

import ast
import dataclasses
import hashlib
import inspect
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from detspec.errors import InputError
from detspec.train.problems.problem import texts
from detspec.train.problems.tasks import Task

STEMS = (
    "def add(a, b):\n    ",
    "def is_empty(self):\n    ",
    "def first(items):\n    ",
    "def close(self):\n    ",
    "def get_name(self):\n    ",
    "def size(self, path):\n    ",
    "def reset(self):\n    ",
    "def join(left, right):\n    ",
)


class RewardedTask(Protocol):
    """A frozen dataclass that draws prompts and rewards texts; both depend on their arguments alone."""

    def draw(self, rng: np.random.Generator, number: int) -> Sequence[tuple[str, Any]]:
        """Draws `number` prompts with `rng` alone; each with what its reward needs to know."""

    def reward(self, known: Any, prompt: str, text: str) -> float | None:
        """The reward of `text` after `prompt`; None leaves it out."""


@dataclasses.dataclass(frozen=True)
class FirstDef:
    """The text must complete a function: its body parses, and something at the margin follows, so it has ended.

    Attributes:
        stems: heads of functions, each with the indent of its first line.
    """

    stems: tuple[str, ...] = STEMS

    def draw(self, rng: np.random.Generator, number: int) -> list[tuple[str, None]]:
        """Draws stems, each as often as the others as far as `number` allows."""
        order = np.concatenate([rng.permutation(len(self.stems)) for _ in range(-(-number // len(self.stems)))])
        return [(self.stems[at], None) for at in order[:number]]

    def reward(self, known: None, prompt: str, text: str) -> float:
        """1 for a whole function that parses, else 0."""
        head, *body = (prompt + text).split("\n")
        ends = next((at for at, line in enumerate(body) if line.strip() and not line.startswith((" ", "\t"))), None)
        if ends is None:
            return 0.0
        try:
            ast.parse("\n".join([head, *body[:ends]]))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
        return 1.0


@dataclasses.dataclass(frozen=True)
class WrittenSteps:
    """Problems whose steps a model writes before the answer, as those of `detspec.train.problems`.

    Attributes:
        problems: draws them.
        ops: smallest and largest number of operations.
    """

    problems: Task
    ops: tuple[int, int]

    def __post_init__(self) -> None:
        if not 1 <= self.ops[0] <= self.ops[1]:
            raise InputError(f"WrittenSteps.ops must be (least, most) numbers of operations from 1 on, got {self.ops!r}")

    def draw(self, rng: np.random.Generator, number: int) -> list[tuple[str, str]]:
        """Draws problems of any number of operations in `ops`; a prompt knows its steps and its answer."""
        drawn = [self.problems.draw(rng, int(n)) for n in rng.integers(self.ops[0], self.ops[1] + 1, number)]
        return [texts(problem, "cot") for problem in drawn]

    def reward(self, known: str, prompt: str, text: str) -> float:
        """The share of words that are right up to the first wrong one: 1 for all steps and the answer.

        A reward for the answer alone would be half right by chance where it is a side of a coin.
        """
        words = text.split()
        expected = known.split()
        right = sum(itertools.takewhile(bool, map(operator.eq, words, expected)))
        return right / max(len(words), len(expected))


def source_digest(task: RewardedTask) -> str:
    """SHA-256 of the source of a task's methods: a run that goes on must have the rewards it began with."""
    methods = [inspect.unwrap(method) for _, method in inspect.getmembers(type(task), inspect.isfunction)]
    written = [method for method in methods if method.__code__.co_filename != "<string>"]  # by hand, not by `dataclass`
    return hashlib.sha256("".join(map(inspect.getsource, written)).encode()).hexdigest()
