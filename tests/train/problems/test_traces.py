"""Problems from files: each kind of bad line by name, and marks in the tokens of a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detspec
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError
from detspec.train.problems.chunks import encode
from detspec.train.problems.problem import Problem
from detspec.train.problems.traces import Traces, read_traces

LINE: dict[str, Any] = {
    "question": "Ann has 2. Bob has 3. How many?",
    "steps": [{"text": "2 + 3 = 5", "mark": 20}],
    "answer": "5",
}
TINY_PYTHON = Path(detspec.__file__).parent / "assets" / "tiny_python" / "tokenizer.json"


def write(folder: Path, *lines: object) -> Path:
    """A file of `lines`: bytes as they are, all else as JSON."""
    path = folder / "traces.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def test_lines_are_read_in_order(tmp_path: Path):
    path = write(tmp_path, LINE, LINE | {"steps": [], "answer": "6"})
    question = LINE["question"]
    assert read_traces(path) == (Problem(question, ("2 + 3 = 5",), (20,), "5"), Problem(question, (), (), "6"))


def test_draw_takes_any_problem_whatever_the_number_of_operations(tmp_path: Path):
    task = Traces(str(write(tmp_path, *(LINE | {"answer": str(i)} for i in range(5)))), "unread")
    rng = np.random.default_rng(0)
    assert {task.draw(rng, n).answer for n in range(60)} == set("01234")
    assert task.draw(np.random.default_rng(1), 1) == task.draw(np.random.default_rng(1), 9)
    assert task.words() == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON: Expecting property name .* .column 2."),
        (b"", "is not JSON: Expecting value"),
        (b'"\xff"', "is not UTF-8 .byte 2."),
        (b'{"question": "\\ud800"}', "half of a surrogate pair"),
        (b"9" * 5000, "is JSON that cannot be read"),
        ([LINE], 'the line must be a JSON object with "question", "steps", "answer", got'),
        ({"question": "Ann?"}, 'the line has no "steps", "answer"; it needs "question", "steps", "answer"'),
        (LINE | {"id": 1}, 'the line has unknown "id"; accepted are'),
        (LINE | {"steps": "5"}, '"steps" must be a list of objects with "text", "mark", got \'5\''),
        (LINE | {"steps": ["5"]}, 'step 1 must be a JSON object with "text", "mark", got \'5\''),
        (LINE | {"steps": [*LINE["steps"], {"text": "5"}]}, 'step 2 has no "mark"; it needs "text", "mark"'),
        (LINE | {"steps": [{"text": "5", "mark": 1, "end": 2}]}, 'step 1 has unknown "end"; accepted are'),
        (LINE | {"steps": [{"text": "5", "mark": 0}]}, "mark must be an integer from 1 to the question's 31 characters, got 0"),
        (LINE | {"steps": [{"text": "5", "mark": 32}]}, "from 1 to the question's 31 characters, got 32"),
        (LINE | {"steps": [{"text": "5", "mark": None}]}, "got None"),
        (LINE | {"steps": [{"text": "2", "mark": 9}, {"text": "5", "mark": 8}]}, r"marks must not descend, got \[9, 8\]"),
        (LINE | {"answer": 5}, "the answer of a problem must be text"),
    ],
)
def test_bad_line_is_refused_with_file_and_number(tmp_path: Path, line: object, message: str):
    path = write(tmp_path, LINE, line, LINE)
    with pytest.raises(InputError, match=rf"traces\.jsonl, line 2: .*{message}"):
        read_traces(path)


def test_missing_and_empty_files_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.jsonl: no such file of problems"):
        read_traces(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="holds no problems; write one JSON object"):
        read_traces(write(tmp_path))


def test_marks_are_the_bytes_tokens_that_complete_what_steps_follow_from():
    """Every character of a text of one to four bytes a character: the tokens through the mark hold it, those before do not."""
    tokenizer = Tokenizer(TINY_PYTHON).library
    question = "Zoë pays 20 € for 3 🍎🍎: how much?"
    places = tuple(i + 1 for i, character in enumerate(question) if character != " ")
    problem = Problem(question, ("x",) * len(places), places, "7")
    encoded = encode([problem], tokenizer, "thinking")[0]
    assert tokenizer.decode(encoded.prompt) == f"{question} A:"
    for place, mark in zip(places, encoded.marks, strict=True):
        assert tokenizer.decode(encoded.prompt[: mark + 1]).startswith(question[:place])
        assert not tokenizer.decode(encoded.prompt[:mark]).startswith(question[:place])
    assert tokenizer.decode(encoded.steps[0] + encoded.continuation[:-1]) == " x 7"
