"""Problems read from a file: one JSON object a line, each step with a mark in the question."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from detspec.errors import InputError
from detspec.read_json import parse_json
from detspec.train.problems.problem import Problem

LINE_KEYS = ("question", "steps", "answer")
STEP_KEYS = ("text", "mark")


@dataclasses.dataclass(frozen=True)
class Traces:
    """Problems read from a file, such as school arithmetic with worked steps.

    {"question": "Ann has 2. Bob has 3. How many?", "steps": [{"text": "2 + 3 = 5", "mark": 20}], "answer": "5"}
    """

    path: str  # file of problems
    tokenizer_from: str  # folder that holds the `tokenizer.json` for these texts

    def words(self) -> tuple[str, ...]:
        """Empty: the tokenizer defines the words."""
        return ()

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """Any of the problems, all equally likely; `n` is ignored."""
        return self.problems[int(rng.integers(len(self.problems)))]

    @functools.cached_property
    def problems(self) -> tuple[Problem, ...]:
        """All problems in the order of the file, which is read once."""
        return read_traces(self.path)

    def check(self, check_fn: Callable[[Problem], object]) -> None:
        """Calls `check_fn` on every problem. If it raises `InputError`, the file and the line are added to the message."""
        for number, problem in enumerate(tqdm(self.problems, desc=Path(self.path).name, unit="problem", disable=None), 1):
            try:
                check_fn(problem)
            except InputError as error:
                raise InputError(f"{self.path}, line {number}: {error}") from error

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex over all problems; it identifies the data of a run."""
        return hashlib.sha256(json.dumps([dataclasses.asdict(problem) for problem in self.problems]).encode()).hexdigest()


def read_traces(path: str | Path) -> tuple[Problem, ...]:
    """The problems of the UTF-8 file at `path`; `InputError` names the file and the line that is malformed."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file of problems")
    problems = []
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        try:
            problems.append(parse_line(raw))
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise InputError(f"{path} holds no problems; write one JSON object with {quoted(LINE_KEYS)} a line")
    return tuple(problems)


def parse_line(raw: bytes) -> Problem:
    """Parses one line into a problem; `InputError` says what is wrong with it."""
    line = parse_json(raw)
    require_keys("the line", line, LINE_KEYS)
    if not isinstance(line["steps"], list):
        raise InputError(f'"steps" must be a list of objects with {quoted(STEP_KEYS)}, got {line["steps"]!r}')
    for i, step in enumerate(line["steps"]):
        require_keys(f"step {i + 1}", step, STEP_KEYS)
    steps = tuple(step["text"] for step in line["steps"])
    return Problem(line["question"], steps, tuple(step["mark"] for step in line["steps"]), line["answer"])


def require_keys(what: str, given: Any, keys: tuple[str, ...]) -> None:
    """Raises `InputError` unless `given` is an object with `keys` and no others."""
    if not isinstance(given, dict):
        raise InputError(f"{what} must be a JSON object with {quoted(keys)}, got {given!r}")
    if missing := [key for key in keys if key not in given]:
        raise InputError(f"{what} has no {quoted(missing)}; it needs {quoted(keys)}")
    if extra := [key for key in given if key not in keys]:
        raise InputError(f"{what} has unknown {quoted(extra)}; accepted are {quoted(keys)}")


def quoted(keys: tuple[str, ...] | list[str]) -> str:
    """Keys in quotes, as in JSON."""
    return ", ".join(f'"{key}"' for key in keys)
