"""Outputs as parquet files: the same values, log-probabilities with their bits."""

import json
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from detspec.cli.commands import main
from detspec.errors import InputError
from detspec.jobs.convert_output import convert_output

LOGPROBS = np.random.default_rng(0).normal(size=2000).astype(np.float32)
LINES = [
    {
        "id": f"r{i}",
        **({"index": 1} if i == 7 else {}),
        "token_ids": [i, 2],
        "text": "é",
        "logprobs": [float(LOGPROBS[i]), -0.0],
        "finish_reason": "length",
        "prompt_len": 3,
        "digest": "d",
        **({"top_logprobs": [[[5, -0.5]]]} if i % 2 else {}),
    }
    for i in range(2000)
]


def write(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_hold_what_the_lines_hold(tmp_path):
    source, target = write(tmp_path / "out.jsonl", LINES), tmp_path / "out.parquet"
    assert main(["convert-output", str(source), str(target)]) == 0
    table = parquet.read_table(target)
    assert [str(table.schema.field(name).type) for name in ("token_ids", "logprobs", "prompt_len", "text")] == [
        "list<element: int32>",
        "list<element: float>",
        "int32",
        "string",
    ]
    found = table.to_pylist()
    for row, line in zip(found, LINES, strict=True):
        assert row["index"] == line.get("index")
        assert row["top_logprobs"] == (json.dumps(line["top_logprobs"]) if "top_logprobs" in line else None)
        assert all(row[name] == line[name] for name in ("id", "token_ids", "text", "finish_reason", "prompt_len", "digest"))
    bits = np.asarray([row["logprobs"] for row in found], np.float32)
    assert bits.tobytes() == np.stack([LOGPROBS, np.full(2000, -0.0, np.float32)], axis=1).tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.parquet"]


def test_file_that_is_there_is_left_as_it_is_unless_it_is_to_be_fresh(tmp_path, capsys):
    source, target = write(tmp_path / "out.jsonl", LINES[:2]), tmp_path / "labels.parquet"
    target.write_text("mine")
    assert main(["convert-output", str(source), str(target)]) == 2
    assert f"{target} is there already: name another file, or write over it with --fresh" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["convert-output", str(source), str(target), "--fresh"]) == 0
    assert parquet.read_table(target).num_rows == 2


def test_answers_in_openai_format_keep_their_bodies_as_text(tmp_path):
    line = {"id": "batch_req_0", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    convert_output(write(tmp_path / "out.jsonl", [line]), tmp_path / "out.parquet")
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert row == {**line, "response": json.dumps(line["response"])}


@pytest.mark.parametrize(
    ("lines", "said"),
    [([], "holds no lines"), ([5], "line 1 must be a JSON object"), ([{"id": "a", "token_ids": "x"}], "no output of a job")],
)
def test_what_is_no_output_is_refused_and_nothing_is_left(lines, said, tmp_path):
    with pytest.raises(InputError, match=said):
        convert_output(write(tmp_path / "out.jsonl", lines), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
