"""What a config names as its task: a frozen dataclass, `Parity(filler=0.8)`, that draws problems and knows their words."""

from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from detspec.checkpoint.tokenizer import read_tokenizer
from detspec.train.problems.problem import Problem
from detspec.train.problems.traces import Traces
from detspec.train.problems.words import word_tokenizer


class Task(Protocol):
    """`Parity`, `Variables`, `TwoHop`, `Traces`, or what a config makes itself."""

    def words(self) -> tuple[str, ...]:
        """All words of its texts, or none if it brings a tokenizer."""

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """A problem of `n` operations, a function of `rng` alone; `InputError` if there is none of that many."""


def tokenizer_of(task: Task) -> tokenizers.Tokenizer:
    """The tokenizer for the texts of `task`: of its words, or the one of the folder that `Traces` name."""
    if isinstance(task, Traces):
        return read_tokenizer(Path(task.tokenizer_from) / "tokenizer.json")
    return word_tokenizer(task.words())


def data_digest(task: Task) -> str | None:
    """Digest of the file that `task` draws from; None if it makes its problems up."""
    return task.digest if isinstance(task, Traces) else None
