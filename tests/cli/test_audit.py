"""`detspec audit` as users run it, on what `detspec generate` wrote."""

import json
from pathlib import Path

import pytest

from detspec.cli.commands import main
from tests.engine.byte_model import some_prompts

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
