"""The task of a config: a frozen dataclass, such as `Parity(filler=0.8)`, that draws problems and lists their words."""

from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from detspec.checkpoint.tokenizer import Tokenizer
from detspec.train.problems.problem import Problem
from detspec.train.problems.traces import Traces
from detspec.train.problems.words import word_tokenizer


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
