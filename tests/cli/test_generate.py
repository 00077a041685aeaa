"""`detspec generate` as users run it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from detspec.cli.commands import main
from tests.engine.byte_model import broken_params, some_prompts, write_folder

OPTIONS = ("--max-tokens", "12", "--max-len", "64", "--max-rows", "2", "--method", "none", "--temperature", "0.7")


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def some_lines(number: int = 4) -> list[dict]:
    prompts = some_prompts(4)
    return [{"id": f"r{i}", "prompt_token_ids": prompts[i % 4], "sampling": {"seed": i}} for i in range(number)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_lines(tmp_path_factory.mktemp("prompts") / "in.jsonl", some_lines())


@pytest.fixture(scope="module")
def generated(detspec, folder, prompts, tmp_path_factory) -> Path:
    """Output of a first run, which had to compile."""
    out = tmp_path_factory.mktemp("first") / "out.jsonl"
    done = detspec("generate", "--model", folder, "--prompts", prompts, "--out", out, *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "warning" not in done.stderr.lower()
    assert all(line.startswith("detspec: ") for line in done.stderr.splitlines())  # no bars, no chatter of libraries
    assert "4 requests, 48 tokens in " in done.stderr
    return out


def seconds(out: Path) -> float:
    return json.loads(out.with_name("out.stats.json").read_text())["compile_s"]


def test_generate_writes_three_files(generated):
    assert sorted(path.name for path in generated.parent.iterdir()) == ["out.jsonl", "out.manifest.json", "out.stats.json"]
    assert [json.loads(line)["id"] for line in generated.read_text().splitlines()] == ["r0", "r1", "r2", "r3"]


def test_compile_cache_makes_the_second_start_faster_and_changes_no_bit(
    generated, detspec, environment, folder, prompts, tmp_path
):
    cache = Path(environment["XDG_CACHE_HOME"])
    assert any(path.is_file() for path in (cache / "detspec" / "xla").rglob("*"))
    for name, extra in (("with", ()), ("without", ("--no-compile-cache",))):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "out.jsonl"
        done = detspec("generate", "--model", folder, "--prompts", prompts, "--out", out, *OPTIONS, *extra)
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("detspec: ") for line in done.stderr.splitlines())
        assert out.read_bytes() == generated.read_bytes()
    assert seconds(tmp_path / "with" / "out.jsonl") < 0.7 * seconds(tmp_path / "without" / "out.jsonl")


def test_generate_from_stdin_to_stdout_gives_the_same_bytes(generated, detspec, folder, prompts, tmp_path):
    done = detspec(
        "generate", "--model", folder, "--prompts", "-", "--out", "-", *OPTIONS, input=prompts.read_text(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == generated.read_text()
    assert list(tmp_path.iterdir()) == []


def test_generate_killed_half_way_leaves_no_output_and_the_old_one_whole(command, environment, folder, tmp_path):
    prompts = write_lines(tmp_path / "in.jsonl", some_lines(4000))
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    argv = [*command, "generate", "--model", folder, "--prompts", prompts, "--out", out, *OPTIONS]
    process = subprocess.Popen(list(map(str, argv)), env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size for path in tmp_path.glob(".out.jsonl.*.tmp")):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert out.read_text() == "old\n"
    assert not (tmp_path / "out.stats.json").exists()


def test_generate_interrupted_cleans_up_and_exits_130(command, environment, folder, tmp_path):
    prompts = write_lines(tmp_path / "in.jsonl", some_lines(4000))
    argv = [*command, "generate", "--model", folder, "--prompts", prompts, "--out", tmp_path / "out.jsonl", *OPTIONS]
    process = subprocess.Popen(list(map(str, argv)), env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size for path in tmp_path.glob(".out.jsonl.*.tmp")):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=60)[1].decode()
    finally:
        process.kill()
    assert process.returncode == 130
    assert shown.splitlines()[-1] == "detspec: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# In this process ------------------------------------------------------------------------------------------------------------


def generate(folder: Path, prompts: object, out: object, *extra: str) -> int:
    options = ("--no-compile-cache", *OPTIONS, *extra)
    return main(["generate", "--model", str(folder), "--prompts", str(prompts), "--out", str(out), *options])


def test_broken_logits_exit_with_1_and_name_the_requests(tmp_path, capsys):
    folder = write_folder(tmp_path / "model", broken_params(200))
    prompts = write_lines(
        tmp_path / "in.jsonl", [{"id": "a", "prompt_token_ids": [1]}, {"id": "broken", "prompt_token_ids": [200]}]
    )
    assert generate(folder, prompts, tmp_path / "out.jsonl") == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["id"], line["finish_reason"]) for line in found] == [("a", "length"), ("broken", "error")]
    assert capsys.readouterr().err.splitlines()[-1] == ("detspec: error: the model gave logits that are not finite for: broken")


@pytest.mark.parametrize(
    ("text", "extra", "message"),
    [
        ('{"id": "a"', (), "in.jsonl line 1: is not JSON"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', (), "line 2: id 'a' was already used on line 1"),
        ('{"id": "a", "prompt": "x", "temperature": 1}', (), "line 1: unknown key 'temperature'"),
        ('{"id": "a", "prompt": "' + "x" * 100 + '"}', (), "line 1: the prompt has 100 tokens"),
        ('{"id": "a", "prompt": "x"}', ("--temperature", "-1"), "sampling parameter temperature"),
        ('{"id": "a", "prompt": "x"}', ("--max-rows", "0"), "EngineConfig.max_rows"),
        ('{"id": "a", "prompt": "x"}', ("--max-len", "4096"), "max_len 4096 exceeds the 128 positions"),
        ("", (), "holds no requests"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_leaves_the_old_output(text, extra, message, folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "out.jsonl").write_text("old\n")
    assert generate(folder, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *extra) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("detspec: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_files_and_folders_that_are_not_there_are_refused(folder, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for argv, message in [
        ((folder, tmp_path / "no.jsonl", out), "no.jsonl: No such file"),
        ((folder, tmp_path, out), "Is a directory"),
        ((folder, prompts, tmp_path), "is a folder"),
        ((folder, prompts, tmp_path / "no" / "out.jsonl"), "there is no folder"),
        ((tmp_path / "no model", prompts, out), "no model"),
    ]:
        assert generate(*argv) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
