"""Metadata of a line: carried to its lines of output as it is, a part of no digest, and checked by audits."""

import datetime
import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from detspec.errors import InputError
from detspec.jobs.convert_output import convert_output
from detspec.jobs.difference import metadata_difference
from detspec.jobs.job import run_job, stream_job
from detspec.jobs.lines import MAX_METADATA_BYTES, parse_line, parse_request
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.jobs.records import parse_record
from detspec.jobs.tables import open_prompts
from detspec.sampling_params import SamplingParams
from tests.jobs.audited import read_lines, write_lines
from tests.jobs.paced import PacedEngine

DEFAULTS = SamplingParams(max_tokens=4)
CARRIED = [
    {"label": 1, "source": {"book": "é", "pages": [1, None, 2.5, 1e-7], "": {}}, "is_held_out": True},
    {},
    None,
    {"id": "mine", "text": "x" * 300, "large": 2**80},
]
RECORD = {"id": "a", "token_ids": [], "text": "", "logprobs": [], "finish_reason": "length", "prompt_len": 1, "digest": ""}
LINES = [{"id": f"{i}", "prompt_token_ids": [i + 1], "metadata": carried} for i, carried in enumerate(CARRIED)]


def job(engine, folder: Path, lines: list[dict], defaults: SamplingParams = DEFAULTS) -> list[dict]:
    write_lines(folder / "in.jsonl", lines)
    with Prompts(str(folder / "in.jsonl")) as prompts:
        run_job(engine, JobSpec(prompts, defaults), folder / "out.jsonl", fresh=True)
    return read_lines(folder / "out.jsonl")


def paced() -> PacedEngine:
    return PacedEngine(lambda seconds: None)


def test_metadata_are_carried_to_every_sample_and_change_no_digest(tmp_path):
    lines = [*LINES[:3], {**LINES[3], "sampling": {"n": 3}}]
    found = job(paced(), tmp_path, lines)
    assert [line.get("metadata") for line in found] == [*CARRIED[:3], *[CARRIED[3]] * 3]
    assert "metadata" not in found[2]
    assert json.dumps(found[0]["metadata"]) == json.dumps(CARRIED[0])
    without = job(paced(), tmp_path, [{key: line[key] for key in line if key != "metadata"} for line in lines])
    assert [{key: line[key] for key in line if key != "metadata"} for line in found] == without


def test_streamed_lines_carry_metadata(tmp_path):
    whole = job(paced(), tmp_path, LINES)
    with Prompts(str(tmp_path / "in.jsonl")) as prompts, (tmp_path / "streamed").open("wb") as file:
        stream_job(paced(), JobSpec(prompts, DEFAULTS), file)
    assert read_lines(tmp_path / "streamed") == whole


def test_metadata_reach_parquet_and_come_back(tmp_path):
    found = job(paced(), tmp_path, LINES)
    convert_output(tmp_path / "out.jsonl", tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    texts = table["metadata"].to_pylist()
    assert [None if text is None else json.loads(text) for text in texts] == CARRIED
    prompts = open_prompts(str(tmp_path / "out.parquet"), column="token_ids", id_column="id")
    again = [json.loads(raw) for _, raw in prompts.lines()]
    assert [line.get("metadata") for line in again] == [line.get("metadata") for line in found]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ([1], r'"metadata" must be a JSON object, got \[1\]'),
        ("a", "must be a JSON object, got 'a'"),
        (0, "must be a JSON object, got 0"),
        ({"a": [float("nan")]}, "must hold finite numbers"),
        ({"a": float("inf")}, "must hold finite numbers"),
        ({"a": "x" * MAX_METADATA_BYTES}, f"has {MAX_METADATA_BYTES + 9} bytes as JSON, more than the {MAX_METADATA_BYTES}"),
    ],
)
def test_metadata_that_cannot_travel_are_refused_by_name(metadata, said):
    engine = paced()
    raw = json.dumps({"id": "a", "prompt_token_ids": [1], "metadata": metadata}).encode()
    with pytest.raises(InputError, match=said):
        parse_request(parse_line(0, raw), engine.model, engine.config, DEFAULTS)


def table_lines(folder: Path, metadata) -> list[dict]:
    parquet.write_table(pa.table({"prompt": ["a", "b"], "metadata": metadata}), folder / "x.parquet")
    return [json.loads(raw) for _, raw in open_prompts(str(folder / "x.parquet")).lines()]


MAPS = pa.array([[("a", None), ("b", 1)], None], pa.map_(pa.string(), pa.int32()))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([{"label": 1, "of": {"x": None}}, {"of": {"x": "y"}}], [{"label": 1, "of": {}}, {"of": {"x": "y"}}]),
        (['{"a": [1, null], "b": null}', None], [{"a": [1, None], "b": None}, None]),
        (pa.array(['{"a": 1}', "{}"]).dictionary_encode(), [{"a": 1}, {}]),
        (MAPS, [{"a": None, "b": 1}, None]),
        (pa.array([None, None]), [None, None]),
        (["", '{"a": 1}'], [None, {"a": 1}]),
        ([" ", "null"], [None, None]),
        ([{"a": math.nan, "b": [math.inf, 1.5]}, None], [{"a": None, "b": [None, 1.5]}, None]),
        (['{"a": NaN}', None], [{"a": None}, None]),
    ],
)
def test_columns_of_metadata_travel(column, expected, tmp_path):
    assert [line.get("metadata") for line in table_lines(tmp_path, column)] == expected


MOMENT = datetime.datetime(2026, 1, 1)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1, 2], "column 'metadata' holds int64; accepted are objects, or JSON texts of such"),
        ([["a"], ["b"]], "column 'metadata' holds list<"),
        ([1.5, None], "column 'metadata' holds double"),
        ([b"a", None], "column 'metadata' holds binary"),
        ([{"a": 1, "at": MOMENT}, None], "metadata.at holds timestamp[us], which JSON has no value for"),
        ([{"a": [{"b": b"x"}]}, None], "metadata.a[].b holds binary"),
        (["", "plain"], "its first text, 'plain', is no JSON object"),
        ([None, "[1]"], "its first text, '[1]', is no JSON object"),
        (['{"a": 1', "{}"], "its first text"),
    ],
)
def test_column_of_metadata_that_are_no_objects_is_passed_over_with_a_line_that_says_so(column, said, tmp_path, capsys):
    assert table_lines(tmp_path, column) == [{"id": "0", "prompt": "a"}, {"id": "1", "prompt": "b"}]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("detspec: warning: the column 'metadata' is passed over: ")
    assert said in line
    passed_over = open_prompts(str(tmp_path / "x.parquet"))
    parquet.write_table(pa.table({"prompt": ["a", "b"], "metadata": [{"a": 1}, {"a": 2}]}), tmp_path / "x.parquet")
    assert passed_over.columns.metadata is None
    assert open_prompts(str(tmp_path / "x.parquet")).columns.metadata == "metadata"


@pytest.mark.parametrize("second", [{"metadata": ["x"]}, {"metadata": [1]}, {"metadata": [[1]]}, {}], ids=str)
def test_metadata_that_shards_disagree_on_are_passed_over(second, tmp_path, capsys):
    parquet.write_table(pa.table({"prompt": ["a"], "metadata": [{"a": 1}]}), tmp_path / "x-0-of-2.parquet")
    parquet.write_table(pa.table({"prompt": ["b"], **second}), tmp_path / "x-1-of-2.parquet")
    found = [json.loads(raw) for _, raw in open_prompts(str(tmp_path)).lines()]
    assert found == [{"id": "0", "prompt": "a"}, {"id": "1", "prompt": "b"}]
    assert "x-1-of-2.parquet has" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["plain", "[1]", '{"a": 1'])
def test_text_of_metadata_that_is_no_object_is_an_error_of_its_row(text, tmp_path):
    engine = paced()
    raw = json.dumps(table_lines(tmp_path, ["{}", text])[1]).encode()
    with pytest.raises(InputError, match='"metadata" must'):
        parse_request(parse_line(0, raw), engine.model, engine.config, DEFAULTS)


def test_metadata_are_part_of_what_a_table_is(tmp_path):
    """A column that is read as metadata, and the same bytes read otherwise, are other prompts."""
    parquet.write_table(pa.table({"prompt": ["a"], "metadata": ["{}"]}), tmp_path / "x")
    digests = {open_prompts(str(tmp_path / "x"), **options).sha256 for options in ({}, {"id_column": "metadata"})}
    assert len(digests) == 2


def test_record_whose_metadata_are_no_object_is_refused():
    assert parse_record(json.dumps({**RECORD, "metadata": {"a": 1}}).encode(), 8).metadata == {"a": 1}
    with pytest.raises(InputError, match='"metadata" must be an object, got 3'):
        parse_record(json.dumps({**RECORD, "metadata": 3}).encode(), 8)


CHANGED = [
    ({"label": 2}, "metadata.label: recorded 2, canonical 1"),
    ({"label": True}, "metadata.label: recorded true, canonical 1"),
    ({"label": 1, "more": 0}, "metadata.more: recorded 0, canonical nothing"),
    ({}, "metadata.label: recorded nothing, canonical 1"),
    (None, 'metadata: recorded nothing, canonical {"label": 1}'),
]


@pytest.mark.parametrize(("changed", "what"), CHANGED)
def test_metadata_that_were_changed_are_named(changed, what):
    record = parse_record(json.dumps(RECORD if changed is None else {**RECORD, "metadata": changed}).encode(), 8)
    found = metadata_difference(record, {"label": 1})
    assert (found.record, found.position, found.what) == ("a", None, what)
    assert metadata_difference(record, changed) is None
