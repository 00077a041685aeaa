"""Lines with which something goes wrong, when they are read or while they are generated: they fail alone."""

import json

import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.jobs.audit import run_audit
from detspec.jobs.job import run_job
from detspec.jobs.lines import LINE_KEYS, parse_line, parse_request
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.jobs.records import read_records
from detspec.sampling_params import FIELDS, SamplingParams

NUMBERS = [2**31, 2**63, 2048, -1]  # the vocabulary has 2048 tokens
PLAIN = SamplingParams()
SHORT = SamplingParams(max_tokens=2)
FAULT = "ZeroDivisionError: planted"


def own(id: str, **sampling) -> dict:
    return {"id": id, "prompt": "def f", "sampling": {"max_tokens": 2, **sampling}}


def batch(id: str, **fields) -> dict:
    body = {"prompt": "def f", "max_tokens": 2, "seed": 1, **fields}
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body}


def job(engine: Engine, folder, lines: list[dict], *, defaults=PLAIN, **spec):
    """The result of a job, and its lines of output."""
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with Prompts(str(folder / "in.jsonl")) as prompts:
        result = run_job(engine, JobSpec(prompts, defaults, **spec), folder / "out.jsonl", fresh=True)
    return result, read(folder, "out")


def read(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def planted(monkeypatch):
    """Something goes wrong with texts of seed 4711, once they are there."""
    from detspec.engine import sequence

    digest = sequence.completion_digest

    def fails(request, *rest):
        if request.sampling.seed == 4711:
            raise ZeroDivisionError("planted")
        return digest(request, *rest)

    monkeypatch.setattr(sequence, "completion_digest", fails)


@pytest.mark.parametrize("number", NUMBERS)
def test_stop_token_that_is_none_rejects_its_line_alone(three_rows, tmp_path, number):
    lines = [own("x"), own("y", stop_token_ids=[number]), own("z")]
    result, found = job(three_rows, tmp_path, lines, on_error="reject")
    assert [line["id"] for line in found] == ["x", "z"]
    assert result.num_rejected == 1
    assert f"stop_token_ids {'names token id' if number == 2048 else 'must'}" in read(tmp_path, "out.rejects")[0]["error"]


@pytest.mark.parametrize("number", NUMBERS)
def test_stop_token_that_is_none_answers_its_batch_line_with_an_error(three_rows, tmp_path, number):
    lines = [batch("x"), batch("y", stop_token_ids=[number]), batch("z")]
    _, found = job(three_rows, tmp_path, lines, is_openai=True)
    assert [line["custom_id"] for line in found] == ["x", "z"]
    (error,) = read(tmp_path, "out.errors")
    assert (error["custom_id"], error["response"]["body"]["error"]["param"]) == ("y", "stop_token_ids")


def test_request_that_fails_has_a_line_that_says_so(three_rows, tmp_path, planted):
    result, found = job(three_rows, tmp_path, [own("x"), own("y", seed=4711), own("z")])
    assert [(line["id"], line["finish_reason"], line.get("error")) for line in found] == [
        ("x", "length", None),
        ("y", "error", FAULT),
        ("z", "length", None),
    ]
    assert (result.num_failed, result.failed) == (1, ("y",))
    assert [record.finish_reason for record in read_records(tmp_path / "out.jsonl", 2048)] == ["length", "error", "length"]


def test_batch_line_that_fails_is_answered_with_an_error(three_rows, tmp_path, planted):
    _, found = job(three_rows, tmp_path, [batch("x"), batch("y", seed=4711, n=2), batch("z")], is_openai=True)
    assert [line["custom_id"] for line in found] == ["x", "z"]
    (line,) = read(tmp_path, "out.errors")
    assert (line["custom_id"], line["response"], line["error"]) == ("y", None, {"code": "request_failed", "message": FAULT})


def test_score_that_fails_is_answered_with_an_error_also_of_one_token(three_rows, tmp_path, planted):
    score = {"max_tokens": 0, "echo": True, "seed": 4711}
    lines = [
        batch("x", prompt=[5], **{**score, "seed": 1}),
        batch("y", prompt=[5], **score),
        batch("z", prompt=[5, 6], **score),
    ]
    _, found = job(three_rows, tmp_path, lines, is_openai=True)
    assert [line["custom_id"] for line in found] == ["x"]
    errors = read(tmp_path, "out.errors")
    assert [(line["custom_id"], line["response"], line["error"]["message"]) for line in errors] == [
        ("y", None, FAULT),
        ("z", None, FAULT),
    ]


def test_audit_counts_requests_that_failed_apart(three_rows, tmp_path, planted, monkeypatch):
    monkeypatch.setattr("detspec.engine.replica.certified_passes", lambda device: device.schedule)  # larger programs
    job(three_rows, tmp_path, [own("x"), own("y", seed=4711), own("z")])
    report = run_audit(three_rows.model, tmp_path / "out.jsonl", max_requests=3)
    assert (report.num_failed, report.num_records, report.differences) == (1, 2, [])
    assert "failed              1   these requests hold no tokens, so there is nothing to replay" in report.table()
    lines = read(tmp_path, "out")
    lines[1]["text"] = "a text after all"
    (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = run_audit(three_rows.model, tmp_path / "out.jsonl", max_requests=3)
    assert (report.num_failed, [found.record for found in report.differences]) == (0, ["y"])


def test_key_of_a_line_that_is_null_is_not_given(three_rows, tmp_path):
    plain = {"id": "x", "prompt": "def f"}
    nulls = {**dict.fromkeys(LINE_KEYS), **plain}
    assert job(three_rows, tmp_path, [nulls], defaults=SHORT)[1] == job(three_rows, tmp_path, [plain], defaults=SHORT)[1]
    for key in set(LINE_KEYS) - set(plain):
        assert parsed(three_rows, {**plain, key: None}) == parsed(three_rows, plain)
    assert parsed(three_rows, {"id": "x", "prompt": None, "prompt_token_ids": [5]}).prompt_token_ids == (5,)
    assert parsed(three_rows, {**plain, "sampling": {"seed": 1}}) != parsed(three_rows, plain)
    for refused, message in (
        ({"id": "x", "prompt": None}, "one that is not null"),
        ({**plain, "promt": None}, "unknown key 'promt'"),
    ):
        with pytest.raises(InputError, match=message):
            parsed(three_rows, refused)


def parsed(engine: Engine, line: dict) -> Request:
    return parse_request(parse_line(0, json.dumps(line).encode()), engine.model, engine.config, SHORT)


def test_null_in_a_line_leaves_the_jobs_parameter(three_rows, tmp_path):
    defaults = SamplingParams(max_tokens=2, temperature=0.8, top_k=7, seed=3)
    found = [
        job(three_rows, tmp_path, [{"id": "x", "prompt": "def f", "sampling": given}], defaults=defaults)[1]
        for given in ({}, dict.fromkeys(FIELDS), {"top_k": -1}, {"top_k": 0})
    ]
    assert found[0] == found[1]
    assert found[2] == found[3] != found[0]
