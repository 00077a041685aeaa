"""The audit: each kind of tampering is found where it was done, and what is sound is not taken for tampering."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detspec.checkpoint.load import Model
from detspec.cli.audit import load_recorded
from detspec.cli.commands import parse
from detspec.compile_cache import OFF, VARIABLE
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.environment import fingerprint
from detspec.errors import InputError
from detspec.jobs.audit import run_audit
from detspec.jobs.records import machine_differences, read_origin
from tests.engine.byte_model import SCHEDULE, broken_params, without_tokenizer, write_folder
from tests.jobs.audited import (
    DEFAULTS,
    Lines,
    audit,
    copy,
    edit_manifest,
    make_job,
    prompt_lines,
    read_lines,
    rename_prompts,
    write_lines,
)

pytestmark = pytest.mark.usefixtures("one_program")


@pytest.fixture(scope="module")
def job(one_row, tmp_path_factory) -> Path:
    """The folder of a job whose fourth record is ended by a stop token."""
    folder = tmp_path_factory.mktemp("job")
    lines = prompt_lines()
    stop = read_lines(make_job(one_row, folder, lines))[3]["token_ids"][4]
    lines[3]["sampling"]["stop_token_ids"] = [stop]
    record = read_lines(make_job(one_row, folder, lines))[3]
    assert record["finish_reason"] == "stop"
    assert record["token_ids"][-1] == stop
    return folder


@pytest.mark.slow  # programs of two rooms, twice
def test_records_of_many_biased_tokens_and_of_seeds_of_64_bits_reproduce(model, tmp_path):
    """Seeds that are equal modulo 2**32 give equal records but for the id; the biased tokens are those of the line."""
    bias = {str(token): (3.0, -50.0)[token % 2] for token in range(300)}
    sampled = {"max_tokens": 8, "temperature": 1.0}
    lines = [
        {"id": "plain", "prompt": "ab", "sampling": {**sampled, "seed": 2**32 - 1}},
        {"id": "negative", "prompt": "ab", "sampling": {**sampled, "seed": -1}},
        {"id": "biased", "prompt": "ab", "sampling": {**sampled, "seed": 2**63 - 1, "logit_bias": bias}},
    ]
    config = EngineConfig(max_requests=1, max_len=64, method="none", num_speculative_tokens=3, schedule=SCHEDULE)
    out = make_job(Engine(model, config), tmp_path, lines)
    plain, negative, biased = ({**record, "id": ""} for record in read_lines(out))
    assert plain == negative
    assert biased["token_ids"] != plain["token_ids"]
    assert audit(model, tmp_path).reproduced
    write_lines(tmp_path / "in.jsonl", [*lines[:2], {**lines[2], "sampling": {**lines[2]["sampling"], "logit_bias": {}}}])
    rename_prompts(tmp_path)
    assert not audit(model, tmp_path).reproduced


def set_token(line: dict[str, Any]) -> None:
    line["token_ids"][2] = (line["token_ids"][2] + 1) % 2048


def set_last_bit(line: dict[str, Any]) -> None:
    line["logprobs"][3] = float(np.nextafter(np.float32(line["logprobs"][3]), np.float32(0)))


def set_beyond_float32(line: dict[str, Any]) -> None:
    line["logprobs"][3] = float(np.nextafter(line["logprobs"][3], 0))


def drop_token(line: dict[str, Any]) -> None:
    del line["token_ids"][-1], line["logprobs"][-1]


def drop_logprob(line: dict[str, Any]) -> None:
    del line["logprobs"][-1]


def add_token(line: dict[str, Any]) -> None:
    line["token_ids"].append(7)
    line["logprobs"].append(-1.0)


TAMPERING = {
    "token": (set_token, 2, "token: recorded"),
    "last bit of a log-probability": (set_last_bit, 3, "log-probability: recorded"),
    "digits that float32 does not hold": (set_beyond_float32, 3, "log-probability: recorded"),
    "missing token": (drop_token, -1, "the canonical text goes on with"),
    "missing log-probability": (drop_logprob, -1, "log-probability: recorded"),
    "extra token": (add_token, 0, "the canonical text ends before it"),
    "digest": (lambda line: line.update(digest="0" * 64), None, "digest: recorded '000"),
    "text": (lambda line: line.update(text=line["text"] + " "), None, "text: recorded"),
    "finish reason": (lambda line: line.update(finish_reason="error"), None, "finish_reason: recorded 'error', canonical"),
    "metadata": (lambda line: line["metadata"].update(row=9), None, "metadata.row: recorded 9, canonical "),
    "missing metadata": (lambda line: line.pop("metadata"), None, 'metadata: recorded nothing, canonical {"row": '),
    "prompt length": (lambda line: line.update(prompt_len=99), None, "prompt_len: recorded 99, canonical"),
}


@pytest.mark.parametrize("index", [3, 5], ids=["stopped", "full length"])
@pytest.mark.parametrize("kind", TAMPERING)
def test_tampering_with_a_record_is_found_at_its_place(model, job, tmp_path, kind, index):
    change, position, what = TAMPERING[kind]
    folder = copy(job, tmp_path, "out.jsonl", lambda lines: change(lines[index]))
    length = len(read_lines(job / "out.jsonl")[index]["token_ids"])
    report = audit(model, folder)
    assert [found.record for found in report.differences] == [f"r{index - 1}"]
    expected = position if position is None or position > 0 else length + position
    assert report.differences[0].position == expected
    assert what in report.differences[0].what
    assert (f"token {expected}" if expected is not None else "record") in report.table()


@pytest.mark.parametrize(
    ("changed", "what"), [({"seed": 77}, "token: "), ({"max_tokens": 40}, "goes on with"), ({"ignore_eos": True}, "digest: ")]
)
def test_changed_sampling_is_found(model, job, tmp_path, changed, what):
    folder = copy(job, tmp_path, "in.jsonl", lambda lines: lines[2]["sampling"].update(changed))
    report = audit(model, folder)
    assert [found.record for found in report.differences] == ["r1"]
    assert what in report.differences[0].what


def test_record_that_ended_in_an_error_reproduces(tmp_path):
    model = without_tokenizer(broken_params(200))
    engine = Engine(model, EngineConfig(max_requests=1, max_len=64, method="none", schedule=SCHEDULE))
    make_job(engine, tmp_path, [{"id": "a", "prompt_token_ids": [1]}, {"id": "broken", "prompt_token_ids": [1, 200]}])
    assert read_lines(tmp_path / "out.jsonl")[1]["finish_reason"] == "error"
    assert audit(model, tmp_path).reproduced
    (tmp_path / "tampered").mkdir()
    folder = copy(tmp_path, tmp_path / "tampered", "out.jsonl", lambda lines: lines[1].update(finish_reason="length"))
    assert [found.what for found in audit(model, folder).differences] == ["finish_reason: recorded 'length', canonical 'error'"]


# Samples, stop strings, further log-probabilities ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rich(one_row, tmp_path_factory) -> Path:
    """The folder of a biased job: two samples, a text cut by a stop string, further log-probabilities, processed ones."""
    folder = tmp_path_factory.mktemp("rich")
    defaults = dataclasses.replace(DEFAULTS, logit_bias=((7, 1.5), (9, -2.0)))
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    lines = [
        {"id": "two", "prompt": "a", "sampling": {**sampling, "n": 2}},
        {"id": "cut", "prompt": "a", "sampling": {**sampling, "max_tokens": 24, "seed": 5}},
        {"id": "likely", "prompt": "def", "sampling": {**sampling, "logprobs": 2, "prompt_logprobs": 1}},
        {"id": "processed", "prompt": "def", "sampling": {**sampling, "logprobs": 3, "top_k": 2, "logprobs_mode": "processed"}},
    ]
    text = read_lines(make_job(one_row, folder, lines, defaults))[2]["text"]
    lines[1]["sampling"]["stop"] = [text[9:11]]
    found = read_lines(make_job(one_row, folder, lines, defaults))
    assert [line.get("index") for line in found] == [0, 1, None, None, None]
    assert found[0]["token_ids"] != found[1]["token_ids"]
    assert (found[2]["finish_reason"], found[2]["text"]) == ("stop", text[: text.index(text[9:11])])
    assert len(found[3]["top_logprobs"]) == 12
    assert [line.get("logprobs_mode") for line in found] == [None] * 4 + ["processed"]
    assert {top[2][1] for top in found[4]["top_logprobs"]} == {None}  # top_k left it out
    return folder


def test_samples_stop_strings_and_further_logprobs_reproduce(model, rich):
    report = audit(model, rich)
    assert report.reproduced
    assert report.num_records == 5


def test_processed_records_differ_from_those_of_a_request_for_raw_ones(model, rich, tmp_path):
    """The inverse control."""
    folder = copy(rich, tmp_path, "in.jsonl", lambda lines: lines[3]["sampling"].update(logprobs_mode="raw"))
    (found,) = audit(model, folder).differences
    assert (found.record, found.position) == ("processed", 0)
    assert found.what.startswith("log-probability: recorded ")


def swap_samples(lines: Lines) -> None:
    lines[0]["index"], lines[1]["index"] = 1, 0


def go_on(lines: Lines) -> None:
    """Takes a token more than the stop string leaves, as if it had not been there."""
    lines[2]["token_ids"].append(7)
    lines[2]["logprobs"].append(-1.0)


def lose_last(lines: Lines) -> None:
    del lines[2]["token_ids"][-1], lines[2]["logprobs"][-1]


def abort(lines: Lines) -> None:
    lose_last(lines)
    lines[2]["finish_reason"] = "abort"


def set_likeliest(lines: Lines) -> None:
    lines[3]["top_logprobs"][4][1][1] = float(np.nextafter(np.float32(lines[3]["top_logprobs"][4][1][1]), np.float32(0)))


def set_prompt_logprob(lines: Lines) -> None:
    lines[3]["prompt_logprobs"][2] = -1.0


RICH_TAMPERING = {
    "samples swapped": (swap_samples, ["two[1]", "two[0]"], "token: recorded"),
    "token after the stop string": (go_on, ["cut"], "the canonical text ends before it (stop)"),
    "token that completes the stop string": (lose_last, ["cut"], "the canonical text goes on with"),
    "aborted": (abort, ["cut"], "the canonical text goes on with"),
    "text with the stop string": (lambda lines: lines[2].update(text=lines[2]["text"] + "x"), ["cut"], "text: recorded"),
    "likeliest": (set_likeliest, ["likely"], "top_logprobs: recorded"),
    "no likeliest": (lambda lines: lines[3].pop("top_logprobs"), ["likely"], "top_logprobs: recorded nothing"),
    "prompt": (set_prompt_logprob, ["likely"], "prompt_logprobs: token 2 of the prompt: recorded -1.0"),
    "mode": (
        lambda lines: lines[4].pop("logprobs_mode"),
        ["processed"],
        "logprobs_mode: recorded 'raw', canonical 'processed'",
    ),
    "not asked for": (lambda lines: lines[2].update(prompt_logprobs=[None]), ["cut"], "prompt_logprobs: token 0"),
}


@pytest.mark.parametrize("kind", RICH_TAMPERING)
def test_tampering_with_what_was_asked_for_besides_is_found(model, rich, tmp_path, kind):
    change, records, what = RICH_TAMPERING[kind]
    folder = copy(rich, tmp_path, "out.jsonl", change)
    report = audit(model, folder)
    assert [found.record for found in report.differences] == records
    assert all(what in found.what for found in report.differences)
    cut = len(read_lines(rich / "out.jsonl")[2]["token_ids"])
    expected = {"token after the stop string": cut, "aborted": cut - 1, "likeliest": 4}
    assert report.differences[0].position == expected.get(kind, report.differences[0].position)


@pytest.mark.parametrize(
    ("index", "message"),
    [(2, "'two' has index 2, but its request has n = 2: accepted is an index in 0 .. 1"), (0, r"'two\[0\]' occurs twice")],
)
def test_samples_that_were_not_asked_for_are_refused(model, rich, tmp_path, index, message):
    folder = copy(rich, tmp_path, "out.jsonl", lambda lines: lines[1].update(index=index))
    with pytest.raises(InputError, match=message):
        audit(model, folder)


def test_another_machine_is_named_first(model, job, monkeypatch):
    here = {"detspec": "1", "jaxlib": "0.0.1", "backend": "cpu"}
    monkeypatch.setattr("detspec.jobs.records.fingerprint", lambda: here)
    report = audit(model, job)
    assert report.reproduced  # digests are those of the machine that the manifest names
    assert report.table().splitlines()[1].startswith("another machine: jaxlib is '0.0.1', the records' was '")


def test_other_options_of_the_records_programs_are_named_as_a_difference(job):
    origin = read_origin(job / "out.jsonl")
    assert machine_differences(origin, "1") == []
    held = dataclasses.replace(origin, fingerprint={**origin.fingerprint, "options": {"xla_gpu_autotune_level": 0}})
    assert machine_differences(held, "1") == ["options is None, the records' was {'xla_gpu_autotune_level': 0}"]


@pytest.mark.parametrize(
    ("recorded", "named"), [({}, []), ({"flags": "--b=2"}, ["flags is '--a=1', the records' was '--b=2'"])]
)
def test_flags_that_an_older_manifest_does_not_say_are_no_difference(job, monkeypatch, recorded, named):
    origin = read_origin(job / "out.jsonl")
    here = {name: value for name, value in origin.fingerprint.items() if name in fingerprint()}
    monkeypatch.setattr("detspec.jobs.records.fingerprint", lambda: {**here, "flags": "--a=1"})
    there = dataclasses.replace(origin, fingerprint={**origin.fingerprint, **recorded})
    assert machine_differences(there, "1") == named


def test_prompts_are_found_through_the_manifest_and_their_hash_is_checked(model, job, tmp_path):
    assert run_audit(model, job / "out.jsonl", max_requests=3).reproduced
    folder = copy(job, tmp_path, "out.jsonl", lambda lines: None)
    with (folder / "in.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match="but the job read prompts of SHA-256"):
        audit(model, folder)
    edit_manifest(folder, lambda manifest: manifest["prompts"].update(source="-"))
    with pytest.raises(InputError, match="from the standard input: name their file with --prompts"):
        run_audit(model, folder / "out.jsonl", max_requests=3)


def recorded_model(folder: Path, *options: object) -> Model:
    """The model that `detspec audit --records` loads for what is in `folder`."""
    argv = ["audit", "--records", folder / "out.jsonl", "--no-compile-cache", *options]
    return load_recorded(parse(list(map(str, argv))))


def test_model_is_found_through_the_manifest_unless_one_is_named(model, job, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, OFF)
    folder = copy(job, tmp_path, "out.jsonl", lambda lines: None)
    found = recorded_model(folder)
    assert (found.source, found.digest) == (model.source, model.digest)
    assert audit(found, folder).reproduced
    edit_manifest(folder, lambda manifest: manifest["model"].update(weights="int8"))
    assert recorded_model(folder).cfg.weights == "int8"
    edit_manifest(folder, lambda manifest: manifest["model"].update(source=str(tmp_path / "gone"), weights=None))
    with pytest.raises(InputError, match=r"names the model .*gone, and there is no such folder .* by --model"):
        recorded_model(folder)
    shutil.copytree(model.source, tmp_path / "moved")
    assert recorded_model(folder, "--model", tmp_path / "moved").digest == model.digest


def test_model_whose_weights_are_others_by_now_is_named_with_both_digests(model, job, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, OFF)
    folder = copy(job, tmp_path, "out.jsonl", lambda lines: None)
    other = write_folder(tmp_path / "other", broken_params(7))
    edit_manifest(folder, lambda manifest: manifest["model"].update(source=str(other)))
    found = recorded_model(folder)
    with pytest.raises(InputError, match=f"digest {model.digest}, but {other} has {found.digest}: .* by --model"):
        audit(found, folder)


def test_manifest_of_an_older_version_names_no_model_and_audits_as_before(model, job, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, OFF)
    folder = copy(job, tmp_path, "out.jsonl", lambda lines: None)
    edit_manifest(folder, lambda manifest: manifest.pop("model"))
    assert audit(model, folder).reproduced
    assert recorded_model(folder).source == "tiny_python"
    assert recorded_model(folder, "--model", model.source).digest == model.digest


BAD_INPUT = {
    "no line with the id 'stranger'": lambda f: add_line(f, lambda line: line.update(id="stranger")),
    "the record 'r0' occurs twice": lambda f: add_line(f, lambda line: None),
    "line 8: unknown key 'extra'": lambda f: add_line(f, lambda line: line.update(extra=1)),
    "line 8: lacks digest": lambda f: add_line(f, lambda line: line.pop("digest")),
    'line 8: "token_ids" must hold .*2047, got -1': lambda f: add_line(f, lambda line: line.update(token_ids=[-1])),
    'line 8: "logprobs" must hold finite numbers, got nan': lambda f: add_line(f, lambda line: line.update(logprobs=[np.nan])),
    "line 1: is not JSON": lambda f: (f / "out.jsonl").write_text("{"),
    "holds no records": lambda f: (f / "out.jsonl").write_text("\n"),
    "out.manifest.json is no manifest of a job": lambda f: (f / "out.manifest.json").unlink(),
    "its digest .* is not that of its fingerprint": lambda f: edit_manifest(f, lambda m: m["fingerprint"].update(jaxlib="9")),
    'tokenizer: the records\' model has "0", this one has': lambda f: edit_manifest(
        f, lambda m: m["text"].update(tokenizer="0")
    ),
    "record 'r0' has index 0, but its request has n = 1: .* no index": lambda f: add_line(f, lambda line: line.update(index=0)),
    "line 8: \"index\" must be an integer, got '0'": lambda f: add_line(f, lambda line: line.update(index="0")),
    "is no manifest that this version can read: TypeError": lambda f: edit_manifest(f, lambda m: m["model"].update(source=5)),
    "is no manifest that this version can read: KeyError": lambda f: edit_manifest(f, lambda m: m.pop("sampling")),
    "out.jsonl: there is no such file": lambda f: (f / "out.jsonl").unlink(),
    "in.jsonl: No such file .*--prompts": lambda f: (f / "in.jsonl").unlink(),
}


def add_line(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Adds a record, a changed copy of the second."""
    lines = read_lines(folder / "out.jsonl")
    line = {**lines[1]}
    change(line)
    write_lines(folder / "out.jsonl", [*lines, line])


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_input_is_refused_and_named(model, job, tmp_path, message):
    folder = copy(job, tmp_path, "out.jsonl", lambda lines: None)
    BAD_INPUT[message](folder)
    with pytest.raises(InputError, match=message):
        audit(model, folder)


def test_another_model_is_refused_with_both_digests(model, job):
    other = dataclasses.replace(model, digest="1" * 64)
    with pytest.raises(InputError, match=f"digest {model.digest}, but {model.source} has 1111"):
        audit(other, job)
