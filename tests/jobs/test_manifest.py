"""A manifest names the model; the job is the same wherever its model lies."""

import dataclasses
import json
from pathlib import Path

import pytest

from detspec.jobs.files import journal_path, sibling
from detspec.jobs.generation import StopSignals
from detspec.jobs.job import Unfinished, run_job
from detspec.jobs.manifest import complete_manifest, describe_model, job_header
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.sampling_params import SamplingParams
from tests.engine.fake_device import FAKE_MODEL
from tests.jobs.paced import PacedEngine


def run(folder: Path, source: str, *, stop_after: int | None = None, out: str = "out.jsonl") -> PacedEngine:
    """Runs the job of `folder` with a model from `source`; a signal arrives after `stop_after` steps."""
    signals = StopSignals()
    steps = iter(range(1000))
    engine = PacedEngine(lambda _: signals.take(15 * (next(steps) == stop_after)))
    engine.model = dataclasses.replace(FAKE_MODEL, source=source, family="llama")
    with Prompts(str(folder / "in.jsonl")) as prompts:
        run_job(engine, JobSpec(prompts, SamplingParams(max_tokens=8)), folder / out, signals=signals)
    return engine


@pytest.fixture
def folder(tmp_path) -> Path:
    lines = (json.dumps({"id": f"r{i}", "prompt_token_ids": [i]}) for i in range(12))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_job_goes_on_with_its_model_at_another_path_to_the_same_bytes(folder):
    run(folder, "/models/here", out="whole.jsonl")
    out = folder / "out.jsonl"
    with pytest.raises(Unfinished):
        run(folder, "/models/here", stop_after=12)
    assert journal_path(out).exists()
    assert run(folder, "/models/there").num_added == 8  # four of twelve were kept
    assert out.read_bytes() == (folder / "whole.jsonl").read_bytes()
    manifests = [json.loads(sibling(path, "manifest").read_bytes()) for path in (out, folder / "whole.jsonl")]
    assert [manifest["model"].pop("source") for manifest in manifests] == ["/models/there", "/models/here"]
    assert manifests[0] == manifests[1]
    assert run(folder, "/models/elsewhere").num_added == 0  # complete already


def test_output_whose_manifest_names_no_model_is_complete_and_that_of_another_digest_is_not(folder):
    engine = run(folder, "/models/here")
    out = folder / "out.jsonl"
    path = sibling(out, "manifest")
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("model") == {
        "source": "/models/here",
        "family": "llama",
        "num_params": 3376,
        "dtype": "float32",
        "weights": None,
        "digest": "counts up",
    }
    path.write_text(json.dumps(manifest))
    with Prompts(str(folder / "in.jsonl")) as prompts:
        header = job_header(engine, JobSpec(prompts, SamplingParams(max_tokens=8)))
    assert complete_manifest(out, header) == manifest
    other = {**header, "fingerprint": {**header["fingerprint"], "model": "another digest"}}
    assert complete_manifest(out, other) is None


def test_model_in_a_line_has_its_source_family_size_dtype_and_digest():
    model = dataclasses.replace(FAKE_MODEL, source="/models/qwen", family="qwen3", digest="0123456789abcdef")
    assert describe_model(model) == "/models/qwen, qwen3, 3,376 parameters, float32, digest 0123456789ab"
    rounded = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, weights="int8"), source="tiny_python", family="")
    assert describe_model(rounded) == "the shipped tiny_python, 3,376 parameters, float32 as int8, digest 0123456789ab"
