"""`detspec audit` as users run it, on what `detspec generate` wrote."""

import json
from pathlib import Path

import jax
import pytest

from detspec.checkpoint.hf import save_hf
from detspec.cli.commands import main
from detspec.config import RopeScaling
from detspec.jobs.files import sibling
from detspec.model.dense import with_fields
from detspec.model.params import init_params
from tests.engine.byte_model import some_prompts
from tests.fakes import RANDOM_CFG

pytestmark = pytest.mark.slow

OPTIONS = ("--no-compile-cache", "--max-tokens", "6", "--max-len", "64", "--max-requests", "2", "--method", "none")


@pytest.fixture(scope="module")
def job(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("job")
    lines = [{"id": f"r{i}", "prompt_token_ids": prompt} for i, prompt in enumerate(some_prompts(3))]
    (path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["generate", "--model", folder, "--prompts", path / "in.jsonl", "--out", path / "out.jsonl", *OPTIONS]
    assert main(list(map(str, argv))) == 0
    return path


def audit(folder: Path, job: Path, *extra: object) -> int:
    argv = ["audit", "--model", folder, "--records", job / "out.jsonl", "--max-requests", "2", "--no-compile-cache", *extra]
    return main(list(map(str, argv)))


def test_oracle_for_a_model_in_floats_and_for_a_step_of_a_run_is_refused(folder, job, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert audit(folder, job, "--with", "numpy") == 2
    assert '"numpy" audits integer models alone' in capsys.readouterr().err
    assert main(["audit", "--rl", str(tmp_path), "--step", "1", "--with", "c"]) == 2
    assert "--with is for --records and --responses" in capsys.readouterr().err


def test_audit_of_openai_lines_names_the_field_that_differs(folder, tmp_path, capsys):
    bodies = [
        {"prompt": [5, 17, 9], "max_tokens": 6},
        {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 0, "echo": True, "logprobs": 1},
    ]
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    options = ("--no-compile-cache", "--max-len", "64", "--max-requests", "2", "--method", "none")
    argv = ["generate", "--model", folder, "--prompts", tmp_path / "in.jsonl", "--out", out, *options]
    assert main(list(map(str, argv))) == 0
    assert audit(folder, tmp_path) == 0
    assert "reproduced        2" in capsys.readouterr().out

    first, second = map(json.loads, out.read_text().splitlines())
    second["response"]["body"]["choices"][1]["logprobs"]["token_logprobs"][1] = -1.5
    out.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    assert audit(folder, tmp_path) == 1
    shown = capsys.readouterr().out
    assert "r1                       record     choices[1].logprobs.token_logprobs[1]: recorded -1.5, canonical -" in shown
    (tmp_path / "in.jsonl").unlink()
    assert audit(folder, tmp_path) == 2
    assert "name the file of prompts with --prompts" in capsys.readouterr().err


def test_audit_reports_and_exits_with_0_then_1_then_2(folder, job, tmp_path, capsys):
    prompts = ("--prompts", job / "in.jsonl")
    assert audit(folder, job, *prompts, "--json", tmp_path / "report.json") == 0
    shown = capsys.readouterr()
    assert "reproduced        3" in shown.out
    assert "detspec: replayed 18 tokens in " in shown.err
    assert json.loads((tmp_path / "report.json").read_text())["differences"] == []

    lines = (job / "out.jsonl").read_text().splitlines()
    tampered = json.loads(lines[1])
    tampered["token_ids"][4] = 2047 - tampered["token_ids"][4]
    (job / "out.jsonl").write_text("\n".join([lines[0], json.dumps(tampered), lines[2]]))
    assert audit(folder, job, *prompts) == 1
    out = capsys.readouterr().out
    assert "differing         1" in out
    assert f"token 4    token: recorded {tampered['token_ids'][4]}, canonical" in out

    (job / "out.jsonl").write_text("{}")
    assert audit(folder, job, *prompts) == 2
    assert "out.jsonl line 1: lacks id" in capsys.readouterr().err
    assert audit(folder, tmp_path / "nothing") == 2
    [error] = capsys.readouterr().err.splitlines()  # without loading the model before
    assert error.startswith("detspec: error: ")
    assert "there is no such file" in error


def test_audit_loads_a_model_for_long_texts_as_the_job_did(tmp_path, capsys):
    """The manifest says it, and the digest of the model tells both apart."""
    scaling = RopeScaling("longrope", 4.0, 16, short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(2.0, 3.0, 5.0, 9.0))
    cfg = with_fields(RANDOM_CFG, rope_scaling=scaling, max_position=16, head_dim=8)
    save_hf(tmp_path / "phi3", cfg, init_params(cfg, jax.random.key(0)), eos_ids=())
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "prompt_token_ids": list(range(20))}) + "\n")
    argv = ["generate", "--model", tmp_path / "phi3", "--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    assert main([*map(str, argv), *OPTIONS]) == 2
    assert "exceeds the 16 positions that the model was made for; loaded with long_texts=True" in capsys.readouterr().err
    assert main([*map(str, argv), *OPTIONS, "--long-texts"]) == 0
    replayed = ["audit", "--records", str(tmp_path / "out.jsonl"), "--max-requests", "2", "--no-compile-cache"]
    assert main(replayed) == 0
    manifest = sibling(tmp_path / "out.jsonl", "manifest")
    manifest.write_text(manifest.read_text().replace('"long_texts": true', '"long_texts": false'))
    capsys.readouterr()
    assert main(replayed) == 2
    assert "digest" in capsys.readouterr().err
