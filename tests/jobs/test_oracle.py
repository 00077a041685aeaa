"""Jobs of integer models, audited by an engine, by numpy alone and by audit.c."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.integer.spec import VERSION
from detspec.jobs.audit import run_audit
from detspec.model.dense import dense_config
from detspec.model.params import init_params
from detspec.model.to_integer import integer_config
from tests.jobs.audited import edit_manifest, make_job, read_lines, write_lines

pytestmark = pytest.mark.slow  # whole jobs
CFG = integer_config(dense_config(300, 32, 2, 4, 2, 16, 48, dtype="float32", max_position=64, tie_embeddings=True))
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "seed": 2**40, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
]
BY = [None, "numpy", "c"]


@pytest.fixture(scope="module")
def model() -> ds.Model:
    return ds.Model(CFG, init_params(CFG, jax.random.key(0)), None, (), "an integer model")


@pytest.fixture(scope="module")
def job(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    lines = [
        {"id": f"r{i}", "prompt_token_ids": [i + 1, 2, 3], "sampling": {"max_tokens": 8, **asked}}
        for i, asked in enumerate(SAMPLING)
    ]
    make_job(Engine(model, EngineConfig(max_requests=2, max_len=32, method="none")), folder, lines)
    return folder


def audited(model: ds.Model, folder: Path, by: str | None) -> object:
    return run_audit(model, folder / "out.jsonl", prompts=folder / "in.jsonl", max_requests=2, by=by)


@pytest.mark.parametrize("by", BY)
def test_records_reproduce(model, job, cpu_kernels, by):
    report = audited(model, job, by)
    assert report.reproduced
    assert report.num_records == len(SAMPLING)


def test_manifest_names_the_arithmetic_and_no_machine(model, job):
    (manifest,) = job.glob("*manifest.json")
    assert json.loads(manifest.read_text())["fingerprint"] == {"arithmetic": VERSION, "model": model.digest}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", ["token", "bit"])
def test_changed_token_and_last_bit_are_named(model, job, tmp_path, cpu_kernels, by, kind):
    for file in job.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    records = read_lines(tmp_path / "out.jsonl")
    if kind == "token":
        records[2]["token_ids"][4] = (records[2]["token_ids"][4] + 1) % CFG.vocab_size
    else:
        records[2]["logprobs"][4] = float(np.nextafter(np.float32(records[2]["logprobs"][4]), np.float32(0)))
    write_lines(tmp_path / "out.jsonl", records)
    (found,) = audited(model, tmp_path, by).differences
    assert (found.record, found.position) == ("r2", 4)
    assert found.what.startswith("token" if kind == "token" else "log-probability")


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"logit_bias": {"5": 1.0}}, "logit_bias"), ({"logprobs": 2}, "logprobs"), ({"min_tokens": 2}, "min_tokens")],
)
def test_request_that_oracles_do_not_know_is_refused_by_name(model, tmp_path, changes, says):
    lines = [{"id": "r", "prompt_token_ids": [1, 2], "sampling": {"max_tokens": 3, **changes}}]
    make_job(Engine(model, EngineConfig(max_requests=2, max_len=32, method="none")), tmp_path, lines)
    assert audited(model, tmp_path, None).reproduced
    with pytest.raises(InputError, match=f"asks for {says}, which oracles do not work out"):
        audited(model, tmp_path, "numpy")


def test_another_arithmetic_is_refused(model, job, tmp_path):
    for file in job.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_manifest(tmp_path, lambda manifest: manifest["fingerprint"].update(arithmetic="integer/9"))
    with pytest.raises(InputError, match="integer/9"):
        audited(model, tmp_path, None)
