"""`detspec generate --shard auto` and `detspec merge`; `tests/promises/test_jobs.py` disturbs several workers."""

import json
from pathlib import Path

import pytest

from detspec.cli.commands import main
from tests.engine.byte_model import some_prompts

OPTIONS = ("--max-len", "64", "--max-requests", "2", "--method", "none", "--temperature", "0.7", "--max-tokens", "12")


def write_lines(path: Path, number: int) -> Path:
    prompts = some_prompts(4)
    lines = [{"id": f"r{i}", "prompt_token_ids": prompts[i % 4], "sampling": {"seed": i}} for i in range(number)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(folder: Path, prompts: Path, out: Path, *extra: str) -> int:
    files = ("--model", str(folder), "--prompts", str(prompts), "--out", str(out))
    return main(["generate", "--no-compile-cache", *files, *OPTIONS, *extra])


def test_worker_and_merge_give_the_files_of_one_job(folder, tmp_path, capsys):
    prompts = write_lines(tmp_path / "in.jsonl", 6)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generate(folder, prompts, whole) == 0
    auto = ("--shard", "auto", "--double-check", "100%", "--chunk-lines", "2")
    assert generate(folder, prompts, out, *auto) == 0
    shown = capsys.readouterr().err
    assert "6 chunks, 72 tokens by this worker" in shown
    assert f"all chunks of {out} are done: `detspec merge --out {out}` joins them" in shown
    assert not out.exists()
    assert generate(folder, prompts, out, "--shard", "auto") == 0
    assert main(["merge", "--out", str(out)]) == 0
    assert "6 requests, 72 tokens of 1 workers; 6 lines done twice agree" in capsys.readouterr().err
    assert out.read_bytes() == whole.read_bytes()
    kinds = [path.with_suffix(".manifest.json") for path in (whole, out)]
    assert kinds[0].read_bytes() == kinds[1].read_bytes()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--shard", "auto", "--fresh"), "--fresh would discard what other workers do"),
        (("--double-check", "1%"), "are for --shard auto"),
        (("--shard", "auto", "--chunk-lines", "0"), "at least 1, got 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, tmp_path, capsys, extra, said):
    assert generate(folder, write_lines(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl", *extra) == 2
    assert said in capsys.readouterr().err
