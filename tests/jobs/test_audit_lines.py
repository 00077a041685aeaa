"""The audit of OpenAI's batch lines: sound answers reproduce, whatever they hold; each change of one is found and named."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detspec.checkpoint.chat import ChatTemplate
from detspec.errors import InputError
from detspec.jobs.audit import run_audit
from detspec.jobs.difference import AuditReport, first_other
from detspec.jobs.job import run_job
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.sampling_params import SamplingParams
from tests.jobs.test_batch_lines import CHAT, SCORE, line, some_lines

Lines = list[dict[str, Any]]
SEEDS = range(6)


@pytest.fixture(scope="module")
def talking(model):
    return dataclasses.replace(model, chat_template=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}(", {}))


def asked(*, deterministic: bool = True) -> list[bytes]:
    own = {"max_tokens": 12, "is_deterministic": deterministic}
    return [
        *some_lines(),
        line("prompt", prompt=list(range(20)), prompt_logprobs=1, max_tokens=4),
        line("score of likeliest", prompt="def g(", logprobs=1, top_p=0.5, logprobs_mode="processed", **SCORE),
        line("hot", prompt="a", temperature=-1),
        line("long chat", CHAT, messages=[{"role": "user", "content": "x"}], seed=1),
        *(line(f"drawn {seed}", prompt=list(range(1 + 3 * seed)), seed=seed, logprobs=0, **own) for seed in SEEDS),
    ]


def make_job(engine, model, folder: Path, **keywords) -> Path:
    (folder / "in.jsonl").write_bytes(b"\n".join(asked(**keywords)))
    before = engine.model
    engine.device.model = model
    try:
        with Prompts(str(folder / "in.jsonl")) as prompts:
            spec = JobSpec(prompts, SamplingParams(seed=3), is_openai=True, created=86400)
            run_job(engine, spec, folder / "out.jsonl", fresh=True)
    finally:
        engine.device.model = before
    return folder


@pytest.fixture(scope="module")
def job(three_rows, talking, tmp_path_factory) -> Path:
    return make_job(three_rows, talking, tmp_path_factory.mktemp("job"))


def audit(model, folder: Path) -> AuditReport:
    return run_audit(model, folder / "out.jsonl", prompts=folder / "in.jsonl", max_requests=1)


def read(path: Path) -> Lines:
    return [json.loads(raw) for raw in path.read_bytes().splitlines()]


def copy(job: Path, folder: Path, change: Callable[[Lines], Any] = lambda lines: None) -> Path:
    for name in ("in.jsonl", "out.manifest.json"):
        (folder / name).write_bytes((job / name).read_bytes())
    lines = read(job / "out.jsonl")
    change(lines)
    (folder / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return folder


def test_sound_answers_reproduce_with_and_without_tokens(talking, job, tmp_path):
    report = audit(talking, job)
    lines = read(job / "out.jsonl")
    assert (report.differences, report.machine, report.num_ordinary) == ([], [], 0)
    assert report.num_records == len(lines) == len(asked()) - 1
    assert report.num_tokens == sum(record["response"]["body"]["usage"]["completion_tokens"] for record in lines)
    part = copy(job, tmp_path, lambda lines: lines.reverse() or lines.__delitem__(slice(0, 9)))
    assert audit(talking, part).num_records == len(lines) - 9


def choice_of(record: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return record["response"]["body"]["choices"][index]


def next_float(values: list[float], place: int) -> None:
    values[place] = float(np.nextafter(np.float32(values[place]), np.float32(0)))


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "text": ("drawn", lambda record: choice_of(record).update(text="x"), 'choices[0].text: recorded "x", canonical '),
    "digest": ("chat", lambda record: choice_of(record).update(digest="0"), 'choices[0].digest: recorded "0"'),
    "a bit": (
        "greedy",
        lambda record: next_float(choice_of(record)["logprobs"]["token_logprobs"], 2),
        "choices[0].logprobs.token_logprobs[2]: recorded ",
    ),
    "a bit of a score": (
        "scores",
        lambda record: next_float(choice_of(record, 2)["logprobs"]["token_logprobs"], 39),
        "choices[2].logprobs.token_logprobs[39]: recorded ",
    ),
    "a bit of the prompt": (
        "prompt",
        lambda record: choice_of(record)["prompt_logprobs"][5].popitem(),
        "choices[0].prompt_logprobs[5].",
    ),
    "token": (
        "several",
        lambda record: choice_of(record, 3)["token_ids"].__setitem__(1, 0),
        "choices[3].token_ids[1]: recorded 0",
    ),
    "a choice": (
        "several",
        lambda record: record["response"]["body"]["choices"].pop(),
        "choices[5]: recorded nothing, canonical ",
    ),
    "seed": ("again", lambda record: record["response"]["body"].update(seed=4), "seed: recorded 4, canonical 3"),
    "why": ("echo", lambda record: choice_of(record).update(finish_reason="stop"), 'choices[0].finish_reason: recorded "stop"'),
    "status": ("drawn", lambda record: record["response"].update(status_code=201), "response.status_code: recorded 201"),
    "an error": ("drawn", lambda record: record.update(response=None, error={}), "response: recorded null, canonical "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_found_and_named_and_nothing_else(job, name):
    """Without an engine: the recorded answer takes the place of the canonical one, which the test above says it equals."""
    custom_id, change, said = CHANGES[name]
    (record,) = (record for record in read(job / "out.jsonl") if record["custom_id"] == custom_id)
    changed = json.loads(json.dumps(record))
    assert first_other(changed, record) is None
    change(changed)
    found = first_other(changed, record)
    assert found is not None
    assert found.startswith(said)


def test_altered_records_are_found_by_the_audit(talking, job, tmp_path):
    by_id = {custom_id: change for custom_id, change, _ in CHANGES.values()}

    def change(lines: Lines) -> None:
        for record in lines:
            by_id.get(record["custom_id"], lambda record: None)(record)

    report = audit(talking, copy(job, tmp_path, change))
    assert sorted(found.record for found in report.differences) == sorted(by_id)
    assert report.num_records == len(asked()) - 1
    assert "differing " in report.table()


def test_what_ordinary_requests_got_does_not_pass_for_canonical(one_row, three_rows, talking, job, tmp_path):
    """The inverse control: ordinary answers differ from the canonical ones somewhere, and are found in the place of those."""
    found = []
    for engine in (one_row, three_rows):
        folder = tmp_path / str(engine.config.max_requests)
        folder.mkdir()
        make_job(engine, talking, folder, deterministic=False)
        ordinary = audit(talking, folder)
        assert not ordinary.differences
        assert ordinary.num_ordinary == len(SEEDS)
        found.append(ordinary.num_ordinary_reproduced)
        fake(folder, job)
        named = {difference.record for difference in audit(talking, folder).differences}
        assert named >= {f"drawn {seed}" for seed in SEEDS}  # digests say that they are ordinary
    assert min(found) < len(SEEDS)


def fake(folder: Path, job: Path) -> None:
    """Lets the outputs of `folder` pass for those of `job`, whose prompts they then are."""
    (folder / "in.jsonl").write_bytes((job / "in.jsonl").read_bytes())
    manifest = json.loads((folder / "out.manifest.json").read_text())
    manifest["prompts"]["sha256"] = hashlib.sha256((folder / "in.jsonl").read_bytes()).hexdigest()
    (folder / "out.manifest.json").write_text(json.dumps(manifest))


def test_what_is_no_output_is_one_error(talking, job, tmp_path):
    for change, message in (
        (lambda lines: lines.append(lines[0]), "line 18: the record 'greedy' occurs twice"),
        (lambda lines: lines[1].pop("error"), "line 2: has the keys id, custom_id, response; lines of OpenAI's output have "),
        (lambda lines: lines[2].update(custom_id="none"), "in.jsonl has no line with the id 'none'"),
        (lambda lines: lines.clear(), "holds no records"),
    ):
        with pytest.raises(InputError, match=message):
            audit(talking, copy(job, tmp_path, change))
    (tmp_path / "in.jsonl").write_bytes(b"{}")
    with pytest.raises(InputError, match="but the job read prompts of SHA-256"):
        audit(talking, tmp_path)
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    manifest["prompts"]["source"] = str(tmp_path / "gone.jsonl")
    (tmp_path / "out.manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="name the file of prompts with --prompts"):
        run_audit(talking, tmp_path / "out.jsonl")


def test_another_machine_is_named_and_answers_are_those_of_its_job(talking, job, monkeypatch):
    here = {"detspec": "1", "jaxlib": "0.0.1", "backend": "cpu"}
    monkeypatch.setattr("detspec.jobs.records.fingerprint", lambda: here)
    monkeypatch.setattr("detspec.engine.engine.fingerprint", lambda: here)
    report = audit(talking, job)
    assert report.reproduced
    assert "another machine: jaxlib is '0.0.1'" in report.table()
