"""Jobs of integer models by two implementations, audited by an engine, by numpy alone and by audit.c."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.integer.spec import LIMIT, VERSION
from detspec.jobs.audit import run_audit
from detspec.jobs.job import run_job
from detspec.jobs.oracle import oracle
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.model.dense import dense_config
from detspec.model.params import init_params
from detspec.model.to_integer import float_config, integer_config
from tests.integer.models import SCHEDULE
from tests.jobs.audited import edit_manifest, make_job, read_lines, write_lines

pytestmark = pytest.mark.slow  # whole jobs
CFG = integer_config(dense_config(300, 32, 2, 4, 2, 16, 48, dtype="float32", max_position=64, tie_embeddings=True))
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "seed": 2**40, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.8, "seed": 4, "logit_bias": {"7": 4.0, "8": 3.9, "9": -100.0}, "logprobs": 2},
    {"temperature": 3.0, "seed": 5, "min_tokens": 6, "stop_token_ids": list(range(100, 280)), "logprobs_mode": "processed"},
    {"temperature": 0.7, "seed": 6, "logprobs_mode": "tempered", "logprobs": 20, "prompt_logprobs": 3},
    {"temperature": 0.7, "seed": 7, "top_k": 5, "logprobs_mode": "processed", "logprobs": 8, "n": 2},
    {"prompt_logprobs": 0, "ignore_eos": True, "min_tokens": 3},
]
NUM_RECORDS = len(SAMPLING) + 1  # one request has two samples
BROKEN, EOS = 95, 11  # a token whose embedding has left its range; a token that ends texts
BY = [None, "numpy", "c"]


@pytest.fixture(scope="module")
def model() -> ds.Model:
    params = init_params(CFG, jax.random.key(0))
    params = {**params, "embed": params["embed"].at[BROKEN, 3].set(LIMIT)}
    return ds.Model(CFG, params, None, (EOS,), "an integer model")


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return make_engine(model)


@pytest.fixture(scope="module")
def job(engine, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    lines = [
        {"id": f"r{i}", "prompt_token_ids": [i + 1, 2, 3], "sampling": {"max_tokens": 8, **asked}}
        for i, asked in enumerate(SAMPLING)
    ]
    make_job(engine, folder, lines)
    return folder


def make_engine(model: ds.Model, **changes) -> Engine:
    return Engine(model, EngineConfig(max_requests=2, max_len=32, method="none", **changes))


def audited(model: ds.Model, folder: Path, by: str | None) -> object:
    return run_audit(model, folder / "out.jsonl", prompts=folder / "in.jsonl", max_requests=2, by=by)


@pytest.mark.parametrize("by", BY)
def test_records_reproduce(model, job, cpu_kernels, by):
    report = audited(model, job, by)
    assert report.reproduced
    assert report.num_records == NUM_RECORDS


@pytest.mark.parametrize("by", BY)
def test_records_with_activations_of_8_bits_reproduce_and_a_changed_token_is_named(tmp_path, cpu_kernels, by):
    cfg = integer_config(float_config(CFG), 8)
    model = ds.Model(cfg, init_params(cfg, jax.random.key(0)), None, (EOS,), "an integer model of 8 bits")
    (tmp_path / "job").mkdir()
    lines = [
        {"id": f"r{i}", "prompt_token_ids": [i + 1, 2, 3], "sampling": {"max_tokens": 8, **asked}}
        for i, asked in enumerate(SAMPLING[:3])
    ]
    make_job(make_engine(model), tmp_path / "job", lines)
    (manifest,) = (tmp_path / "job").glob("*manifest.json")
    assert json.loads(manifest.read_text())["fingerprint"] == {"arithmetic": "integer8/1", "model": model.digest}
    assert audited(model, tmp_path / "job", by).reproduced
    change, request, position, says = FALSIFIED["token"]
    (found,) = changed_audit(model, tmp_path / "job", tmp_path, by, lambda records: change(records[request]))
    assert (found.record, found.position) == (f"r{request}", position)
    assert found.what.startswith(says)


def test_operations_of_xla_write_the_same_file(model, job, tmp_path, cpu_kernels):
    make_job(make_engine(model, schedule=SCHEDULE), tmp_path, read_lines(job / "in.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == (job / "out.jsonl").read_bytes()


def test_manifest_names_the_arithmetic_and_no_machine(model, job):
    (manifest,) = job.glob("*manifest.json")
    assert json.loads(manifest.read_text())["fingerprint"] == {"arithmetic": VERSION, "model": model.digest}


def bit(x: float) -> float:
    """The neighbour of a float32 towards 0."""
    return float(np.nextafter(np.float32(x), np.float32(0)))


# Changes of a record, and what names them: a request, a token and the beginning of a sentence.
FALSIFIED = {
    "token": (lambda r: r["token_ids"].__setitem__(4, r["token_ids"][4] ^ 1), 2, 4, "token: recorded"),
    "bit": (lambda r: r["logprobs"].__setitem__(4, bit(r["logprobs"][4])), 2, 4, "log-probability: recorded"),
    "bias": (lambda r: r["top_logprobs"][3][1].__setitem__(1, bit(r["top_logprobs"][3][1][1])), 4, 3, "top_logprobs: recorded"),
    "likeliest": (lambda r: r["top_logprobs"][5][19].__setitem__(0, 299), 6, 5, "top_logprobs: recorded"),
    "processed": (lambda r: r["logprobs"].__setitem__(1, bit(r["logprobs"][1])), 5, 1, "log-probability: recorded"),
    "tempered": (lambda r: r["logprobs"].__setitem__(0, bit(r["logprobs"][0])), 6, 0, "log-probability: recorded"),
    "prompt": (lambda r: r["prompt_logprobs"].__setitem__(2, bit(r["prompt_logprobs"][2])), 6, None, "prompt_logprobs: token"),
    "likeliest of the prompt": (
        lambda r: r["prompt_top_logprobs"][1].reverse(),
        6,
        None,
        "prompt_top_logprobs: token 1 of the prompt",
    ),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", FALSIFIED)
def test_changed_number_is_named(model, job, tmp_path, cpu_kernels, by, kind):
    change, request, position, says = FALSIFIED[kind]
    (found,) = changed_audit(model, job, tmp_path, by, lambda records: change(records[request]))
    assert (found.record, found.position) == (f"r{request}", position)
    assert found.what.startswith(says)


def changed_audit(model, job: Path, folder: Path, by: str | None, change) -> list:
    """The differences of a copy of the job, in `folder`, whose records are changed."""
    for file in job.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    records = read_lines(folder / "out.jsonl")
    change(records)
    write_lines(folder / "out.jsonl", records)
    return audited(model, folder, by).differences


@pytest.mark.parametrize("by", BY[1:])
@pytest.mark.parametrize(
    ("request_index", "name", "other"), [(4, "logit_bias", {"9": -100.0}), (5, "min_tokens", 1), (6, "logprobs_mode", "raw")]
)
def test_record_of_another_option_is_named(model, engine, job, tmp_path, cpu_kernels, by, request_index, name, other):
    """The numbers themselves are compared, not the digest alone, which names the request's options, too."""
    lines = read_lines(job / "in.jsonl")
    del lines[request_index + 1 :]
    lines[request_index]["sampling"][name] = other
    make_job(engine, tmp_path, lines)
    (theirs,) = (line for line in read_lines(job / "out.jsonl") if line["id"] == f"r{request_index}")
    records = [line for line in read_lines(tmp_path / "out.jsonl") if line["id"] != theirs["id"]]
    write_lines(tmp_path / "out.jsonl", [*records, theirs])
    (found,) = audited(model, tmp_path, by).differences
    assert found.record == f"r{request_index}"
    assert found.position is not None


@pytest.fixture(scope="module")
def broken_job(engine, tmp_path_factory) -> Path:
    """A job of texts that read the broken token, in the prompt or once a bias has made the model write it."""
    folder = tmp_path_factory.mktemp("broken")
    asked = {"max_tokens": 8, "temperature": 1.0, "logprobs": 2}
    lines = [
        {"id": "prompt", "prompt_token_ids": [1, BROKEN, 2], "sampling": {**asked, "prompt_logprobs": 2}},
        {"id": "at once", "prompt_token_ids": [1, 2], "sampling": {**asked, "logit_bias": {str(BROKEN): 100.0}}},
        {"id": "later", "prompt_token_ids": [1, 2], "sampling": {**asked, "n": 16, "logit_bias": {str(BROKEN): 3.5}}},
    ]
    make_job(engine, folder, lines)
    return folder


@pytest.mark.parametrize("by", BY)
def test_text_that_left_its_range_ends_at_the_same_token(model, broken_job, tmp_path, cpu_kernels, by):
    records = read_lines(broken_job / "out.jsonl")
    ended = {(r["id"], r.get("index")): len(r["token_ids"]) for r in records if r["finish_reason"] == "error"}
    assert ended[("prompt", None)] == 0
    assert ended[("at once", None)] == 1
    assert {length for (name, _), length in ended.items() if name == "later"} == {2, 3, 5, 6}
    assert audited(model, broken_job, by).reproduced

    def prolong(records: list) -> None:
        (record,) = (record for record in records if (record["id"], record.get("index")) == ("later", 1))
        record["token_ids"].append(5)
        record["logprobs"].append(-1.0)

    (found,) = changed_audit(model, broken_job, tmp_path, by, prolong)
    assert (found.record, found.position) == ("later[1]", 5)
    assert "the canonical text ends before it (error)" in found.what


def test_lines_in_openais_format_are_answered_again_by_an_engine_alone(model, engine, tmp_path, cpu_kernels):
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "logit_bias": {"7": 3}, "logprobs": 1}
    write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}])
    with Prompts(str(tmp_path / "in.jsonl")) as prompts:
        spec = JobSpec(prompts, ds.SamplingParams(), is_openai=True, created=86400)
        run_job(engine, spec, tmp_path / "out.jsonl", fresh=True)
    assert audited(model, tmp_path, None).reproduced
    with pytest.raises(InputError, match="lines in OpenAI's format are answered by the engine again"):
        audited(model, tmp_path, "c")


def test_what_no_oracle_knows_is_refused_by_name(model):
    with oracle(model, "numpy") as replay_of, pytest.raises(InputError, match="asks for brings, which oracles do not"):
        replay_of(Request("r", (1,), ds.SamplingParams(), brings={"rider": 1}), [2])


def test_another_arithmetic_is_refused(model, job, tmp_path):
    for file in job.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_manifest(tmp_path, lambda manifest: manifest["fingerprint"].update(arithmetic="integer/9"))
    with pytest.raises(InputError, match="integer/9"):
        audited(model, tmp_path, None)
