"""Damaged or malicious prompts, records, journals and manifests: each is taken, or is one `InputError`."""

import dataclasses
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detspec.checkpoint.chat import ChatTemplate
from detspec.checkpoint.conversation import template_time
from detspec.checkpoint.load import Model
from detspec.errors import InputError
from detspec.jobs import prompts as prompts_module
from detspec.jobs.journal import open_journal, read_journal
from detspec.jobs.lines import parse_line, parse_request
from detspec.jobs.manifest import job_header, job_manifest
from detspec.jobs.merge import merge
from detspec.jobs.prompts import MAX_LINE_BYTES, JobSpec, Prompts
from detspec.jobs.records import Origin, PromptsById, machine_differences, parse_record, read_origin
from detspec.jobs.scan import read_lines
from detspec.read_json import parse_json
from detspec.sampling_params import SamplingParams
from tests.hostile import MARK, RAW, as_bytes, damaged, outcome, refusal

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
DEFAULTS = SamplingParams(max_tokens=8)
DEEP = f"{MARK}{RAW.index('[' * 200_000 + ']' * 200_000)}@"
LINES = (
    {"id": "a", "prompt": "def f", "sampling": {"max_tokens": 3, "temperature": 0.5, "stop": ["x"], "logit_bias": {"3": 1.5}}},
    {"id": "b", "prompt_token_ids": [1, 2, 3], "sampling": {"seed": 3, "stop_token_ids": [5], "n": 2, "prompt_logprobs": 1}},
    {
        "id": "c",
        "messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": {"t": [1, 2]}}],
        "chat_template_kwargs": {"tools": [{"name": "f", "parameters": {"x": {"type": "integer"}}}], "enable_thinking": False},
    },
)
TEMPLATE = "{{ tools | tojson | length }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{% endfor %}"
RECORD = {
    "id": "a",
    "index": 1,
    "token_ids": [1, 2],
    "text": "x",
    "logprobs": [-0.5, -1.0],
    "finish_reason": "length",
    "prompt_len": 3,
    "digest": "0" * 64,
    "thoughts": [{"token_ids": [1], "text": "t", "is_cut": False}],
    "top_logprobs": [[[1, -0.5]], [[2, -1.0]]],
}


@pytest.fixture(scope="module")
def chatty(one_row) -> Model:
    return dataclasses.replace(one_row.model, chat_template=ChatTemplate(TEMPLATE, {}))


def test_sound_lines_are_taken(one_row, chatty):
    """The control: what is damaged below is taken as it is."""
    for line in LINES:
        assert parse_request(parse_line(0, as_bytes(line)), chatty, one_row.config, DEFAULTS).id == line["id"]
    assert parse_record(as_bytes(RECORD), 8).id == "a"


@FILES
@given(st.sampled_from(LINES).flatmap(damaged))
def test_any_line_is_a_request_or_one_error(one_row, chatty, raw):
    found = outcome(lambda: parse_request(parse_line(0, raw), chatty, one_row.config, DEFAULTS))
    if not isinstance(found, InputError):
        json.dumps(dataclasses.asdict(found.sampling), allow_nan=False)
        np.asarray(found.prompt_token_ids, np.int32)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "prompt": DEEP}, "nested more than 100 levels deep"),
        ({"id": "a", "messages": [{"content": DEEP}]}, "nested more than 100 levels deep"),
        ({"id": "a", "prompt_token_ids": [10**400]}, "token id 1000"),
        ({"id": "a", "prompt_token_ids": [1] * 3_000_000}, "the prompt has 3000000 tokens"),
        ({"id": "a", "prompt_token_ids": [[1]] * 100_000}, "token id [1]"),
        ({"id": "a", "prompt": "x" * 10_000_000}, "has 10000000 characters, more than 256 for each token"),
        ({"id": "a", "prompt": "x" * MAX_LINE_BYTES}, "has more than the 16 MiB that are accepted"),
        ({"id": "a" * 10_000_000}, "needs one of"),
        ({f"k{i}": 1 for i in range(500_000)} | {"id": "a"}, "unknown key"),
        ({"id": "a", "prompt": "x", "sampling": {"stop": ["a"] * 10**6, "max_tokens": 10**30}}, "max_tokens"),
        (
            {"id": "a", "prompt": "x", "sampling": {"stop_token_ids": list(range(10**6))}},
            "stop_token_ids must name at most 4096 tokens, got 1000000",
        ),
        ({"id": "a", "prompt": "x", "sampling": {"logit_bias": {str(i): 1 for i in range(10**5)}}}, "logit_bias"),
        ({"id": "a", "prompt": "x", "sampling": {"logit_bias": {"9" * 5000: 1}}}, "logit_bias"),
        ({"id": "a", "prompt": "x", "sampling": {"temperature": 10**400}}, "temperature"),
        ({"id": "a", "messages": [{}], "chat_template_kwargs": {"self": 1, "tools": 5}}, "tools must be a list"),
        ({"id": "a", "messages": [{"role": "x" * 9_000_000}]}, "characters"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_hostile_line_is_one_error(one_row, chatty, line, message):
    assert message in refusal(lambda: parse_request(parse_line(0, as_bytes(line)), chatty, one_row.config, DEFAULTS))


def test_variables_of_a_template_may_have_any_name(one_row, chatty):
    """`self` and `messages` are names in the code that renders, too."""
    line = {**LINES[2], "chat_template_kwargs": {"self": 1, "documents": [], "": 2, "a b": 3}}
    assert parse_request(parse_line(0, as_bytes(line)), chatty, one_row.config, DEFAULTS).id == "c"


def test_template_that_prints_the_date_is_given_none(one_row, chatty):
    """A job that goes on another day asks the same."""
    date = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}ab{% endif %}"
    dated = dataclasses.replace(chatty, chat_template=ChatTemplate(date, {}))
    raw = as_bytes({"id": "a", "messages": [{"role": "user", "content": "x"}]})
    assert dated.decode(parse_request(parse_line(0, raw), dated, one_row.config, DEFAULTS).prompt_token_ids) == "ab"
    told = parse_request(parse_line(0, raw), dated, one_row.config, DEFAULTS, template_time(86400))
    assert dated.decode(told.prompt_token_ids) == "1970"


def test_header_names_the_time_that_a_job_is_told(one_row, tmp_path):
    """Else outputs of before stay complete."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(as_bytes(LINES[0]))
    with Prompts(str(path)) as prompts:
        spec = JobSpec(prompts, DEFAULTS)
        assert "created" not in job_header(one_row, spec)
        assert job_header(one_row, dataclasses.replace(spec, created=5))["created"] == 5


@FILES
@given(raws=st.lists(st.sampled_from(LINES).flatmap(damaged), max_size=4), strict=st.booleans())
def test_any_file_of_prompts_is_scanned_or_is_one_error(one_row, tmp_path, raws, strict):
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(raws))

    def read() -> int:
        with Prompts(str(tmp_path / "in.jsonl")) as prompts:
            spec = JobSpec(prompts, DEFAULTS, on_error="stop" if strict else "reject")
            with read_lines(one_row, spec) as reading:
                found = reading.found
                assert [found.first + at for at, count in enumerate(found.counts) if count] == [
                    one.number for one in reading.todo()
                ]
                assert len(list(reading.rejects)) == found.num_rejected
            return found.num_lines

    outcome(read)


def test_line_without_an_end_is_not_held(one_row, tmp_path, monkeypatch):
    """At most 101 bytes of an overlong line are handed on. The lines after it keep their numbers."""
    monkeypatch.setattr(prompts_module, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr("detspec.jobs.lines.MAX_LINE_BYTES", 100)
    sound = json.dumps({"id": "a", "prompt": "x"}).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([b'"' + b"x" * 1000, sound, b"y" * 101, b"z" * 100 + b"\n"]))
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        assert [(mark.place, len(raw)) for mark, raw in prompts.lines()] == [(1, 101), (2, len(sound)), (3, 101), (4, 100)]
        with read_lines(one_row, JobSpec(prompts, DEFAULTS, on_error="reject")) as reading:
            rejected = list(reading.rejects)
            assert reading.found.num_requests == 1
    errors = [json.loads(line)["error"] for line in rejected]
    assert ["that are accepted" in error for error in errors] == [True, True, False]


@FILES
@given(raw=damaged(RECORD))
def test_any_record_is_read_or_is_one_error(raw):
    found = outcome(lambda: parse_record(raw, 8))
    if not isinstance(found, InputError):
        assert found.logprobs.dtype == np.float64
        assert all(0 <= token < 8 for token in found.token_ids)


@pytest.mark.parametrize("logprobs", [[10**400], [float("nan")], [True], [[1]]])
def test_record_with_numbers_that_are_none_is_one_error(logprobs):
    assert '"logprobs" must hold finite numbers' in refusal(lambda: parse_record(as_bytes({**RECORD, "logprobs": logprobs}), 8))


@FILES
@given(raws=st.lists(st.sampled_from(LINES).flatmap(damaged), max_size=4))
def test_prompts_of_an_audit_are_found_or_are_one_error(one_row, chatty, tmp_path, raws):
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(raws))
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        sha256 = prompts.sha256

    def read() -> None:
        origin = Origin("", {}, {}, DEFAULTS, one_row.config, source="", sha256=sha256)
        with PromptsById(tmp_path / "in.jsonl", origin) as asked:
            for id in ("a", "b", "c"):
                asked.asked(id, chatty)

    outcome(read)


# Journals and manifests -------------------------------------------------------------------------------------------------------

HEADER = {"fingerprint": {"a": 1}, "shard": [0, 1]}


def checked(body: bytes) -> bytes:
    """A line of a journal, whose checksum is right whatever stands before it."""
    return body + b', "crc32": "%08x"}\n' % zlib.crc32(body)


@FILES
@given(header=damaged(HEADER), entries=st.lists(st.binary(max_size=30), max_size=2))
def test_any_journal_is_opened_or_is_one_error(tmp_path, header, entries):
    path = tmp_path / "journal"
    lines = [checked(b'{"header": ' + header), *map(checked, entries)]
    path.write_bytes(b"".join(lines))
    outcome(lambda: read_journal(path, HEADER))

    def load() -> None:
        with open_journal(path, HEADER) as journal:
            journal.load(0, [1, 1])

    outcome(load)


@pytest.mark.parametrize(
    "entry",
    [
        b'{"number": %s, "index": 0, "num_tokens": 1, "finish_reason": "stop", "line": {}' % (b"9" * 5000),
        b'{"number": 0, "index": %s, "num_tokens": 1, "finish_reason": "stop", "line": {}' % (b"9" * 5000),
        b'{"number": 7, "index": 0, "num_tokens": 1, "finish_reason": "stop", "line": {}',
        b"[" * 200_000,
    ],
    ids=["number", "index", "other", "deep"],
)
def test_hostile_entry_of_a_journal_is_one_error(tmp_path, entry):
    path = tmp_path / "journal"
    path.write_bytes(checked(b'{"header": ' + json.dumps(HEADER).encode()) + checked(entry))

    def load() -> None:
        journal = read_journal(path, HEADER)
        assert journal is not None
        journal.load(0, [1, 1])

    assert "entry of another job" in refusal(load)
    path.write_bytes(checked(b"[" * 200_000))
    refusal(lambda: read_journal(path, HEADER))


@pytest.fixture(scope="module")
def manifest(one_row, tmp_path_factory) -> dict[str, Any]:
    """The manifest of a job of no lines, made of the parts that `job_manifest` takes."""
    path = tmp_path_factory.mktemp("job") / "in.jsonl"
    path.write_bytes(as_bytes(LINES[1]))
    with Prompts(str(path)) as prompts:
        spec = JobSpec(prompts, DEFAULTS)
        header = job_header(one_row, spec)
        with read_lines(one_row, spec) as reading:
            found = reading.found
        output = {"sha256": "0", "bytes": 0, "num_failed": 0}
        return json.loads(json.dumps({**job_manifest(header, one_row, prompts, found), "output": output}))


@FILES
@given(data=st.data())
def test_any_manifest_of_a_job_is_read_or_is_one_error(manifest, tmp_path, data):
    content = data.draw(damaged(manifest))
    found = outcome(lambda: parse_json(content))
    if isinstance(found, dict) and "fingerprint" in found:  # with a digest that is right
        fingerprint = json.dumps(found["fingerprint"], sort_keys=True).encode()
        content = json.dumps({**found, "digest": hashlib.sha256(fingerprint).hexdigest()}).encode()
    (tmp_path / "out.manifest.json").write_bytes(content)
    origin = outcome(lambda: read_origin(tmp_path / "out.jsonl"))
    if not isinstance(origin, InputError):
        machine_differences(origin, "any")
        assert isinstance(origin.fingerprint["model"], str)


def write_shards(folder: Path, manifest: dict[str, Any], contents: dict[str, bytes]) -> list[Path]:
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for i, path in enumerate(paths):
        path.write_bytes(contents.get("out", b""))
        path.with_suffix(".stats.json").write_bytes(contents.get("stats", b"{}"))
        path.with_suffix(".manifest.json").write_bytes(as_bytes({**manifest, "shard": [i, 2]}) if i else contents["manifest"])
    return paths


@FILES
@given(data=st.data())
def test_any_shards_are_merged_or_are_one_error(manifest, tmp_path, data):
    first = data.draw(damaged({**manifest, "shard": [0, 2]}))
    stats = data.draw(damaged({"num_tokens": 1, "last_start": {"num_tokens": 1, "generate_s": 1.0}}))
    paths = write_shards(tmp_path, manifest, {"manifest": first, "stats": stats})
    outcome(lambda: merge(tmp_path / "whole.jsonl", paths))
