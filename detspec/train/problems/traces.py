"""Problems from a file: one JSON object a line, each step with its place in the question."""

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
from detspec.train.problems.problem import Problem

LINE_KEYS = ("question", "steps", "answer")
STEP_KEYS = ("text", "mark")


@dataclasses.dataclass(frozen=True)
class Traces:
    """Problems of a file, such as school arithmetic with worked steps, each with its mark.

    {"question": "Ann has 2. Bob has 3. How many?", "steps": [{"text": "2 + 3 = 5", "mark": 20}], "answer": "5"}

    Attributes:
        path: the file.
        tokenizer_from: folder of the `tokenizer.json` to read its texts with.
    """

    path: str
    tokenizer_from: str

    def words(self) -> tuple[str, ...]:
        """None: the words are those of the tokenizer."""
        return ()

    def draw(self, rng: np.random.Generator, n: int) -> Problem:
        """Any of the problems, all equally likely; they are as long as they are, whatever `n`."""
        return self.problems[int(rng.integers(len(self.problems)))]

    @functools.cached_property
    def problems(self) -> tuple[Problem, ...]:
        """All problems of the file, in its order, read once."""
        return read_traces(self.path)

    def check(self, check_fn: Callable[[Problem], object]) -> None:
        """Calls `check_fn` on every problem, once for all; an `InputError` of it is raised with the file and the line."""
        for number, problem in enumerate(tqdm(self.problems, desc=Path(self.path).name, unit="problem", disable=None), 1):
            try:
                check_fn(problem)
            except InputError as error:
                raise InputError(f"{self.path}, line {number}: {error}") from error

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex over all problems: what tells the data of one run from that of another."""
        return hashlib.sha256(json.dumps([dataclasses.asdict(problem) for problem in self.problems]).encode()).hexdigest()


def read_traces(path: str | Path) -> tuple[Problem, ...]:
    """The problems of the file at `path`, UTF-8; `InputError` names the file and the line that is none."""
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
    """One line as a problem; `InputError` says what is wrong with it."""
    try:
        line = json.loads(raw.decode("utf-8"))
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 (byte {error.start + 1})") from error
    except UnicodeEncodeError as error:
        raise InputError("holds one half of a surrogate pair, which is no text") from error
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"is JSON that cannot be read: {error}") from error
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
    missing, extra = [key for key in keys if key not in given], [key for key in given if key not in keys]
    if missing:
        raise InputError(f"{what} has no {quoted(missing)}; it needs {quoted(keys)}")
    if extra:
        raise InputError(f"{what} has {quoted(extra)}, which nothing reads; it needs {quoted(keys)}")


def quoted(keys: tuple[str, ...] | list[str]) -> str:
    """Keys as they stand in JSON."""
    return ", ".join(f'"{key}"' for key in keys)
