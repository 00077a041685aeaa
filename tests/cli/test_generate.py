"""`detspec generate` as users run it."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from detspec.checkpoint.load import load
from detspec.cli import generate as cli_generate
from detspec.cli.commands import main
from detspec.errors import InputError
from detspec.jobs.generation import StopSignals
from detspec.model.params import num_params
from tests.engine.byte_model import BYTE_CFG, broken_params, some_prompts, write_folder

OPTIONS = ("--max-tokens", "12", "--max-len", "64", "--max-requests", "2", "--method", "none", "--temperature", "0.7")


NUM_LINES = 400


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
    """Output of a run in a process of its own."""
    out = tmp_path_factory.mktemp("first") / "out.jsonl"
    done = detspec("generate", "--model", folder, "--prompts", prompts, "--out", out, *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not [line for line in done.stderr.splitlines() if "warning" in line.lower() and "no C compiler" not in line]
    assert all(line.startswith("detspec: ") for line in done.stderr.splitlines())  # no bars, no chatter of libraries
    assert "4 requests, 48 tokens in " in done.stderr
    return out


def test_generate_writes_three_files(generated):
    assert sorted(path.name for path in generated.parent.iterdir()) == ["out.jsonl", "out.manifest.json", "out.stats.json"]
    assert [json.loads(line)["id"] for line in generated.read_text().splitlines()] == ["r0", "r1", "r2", "r3"]


@pytest.mark.slow
def test_second_start_finds_its_programs_and_changes_no_bit(generated, detspec, folder, prompts, tmp_path):
    """In a cache folder of its own, on one row, so that there is less to compile.

    A program that was compiled again would be written again, into another inode. What jax keeps by itself is taken away.
    """
    environment = {name: value for name, value in os.environ.items() if "_CACHE" not in name}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "out.jsonl"
        argv = ("generate", "--model", folder, "--prompts", prompts, "--out", out, *OPTIONS, "--max-requests", "1")
        done = detspec(*argv, env=environment)
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("detspec: ") for line in done.stderr.splitlines())
        assert out.read_bytes() == generated.read_bytes()
        written.append({path.name: path.stat().st_ino for path in (tmp_path / "detspec" / "programs").iterdir()})
        shutil.rmtree(tmp_path / "detspec" / "xla")
    assert len(written[0]) >= 3  # reading, a plan, copies of pages
    assert written[1] == written[0]


def test_generate_from_stdin_to_stdout_gives_the_same_bytes(generated, detspec, folder, prompts, tmp_path):
    done = detspec(
        "generate", "--model", folder, "--prompts", "-", "--out", "-", *OPTIONS, input=prompts.read_text(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == generated.read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_generate_resumes_after_every_signal_and_gives_the_same_bytes(command, folder, tmp_path):
    prompts = write_lines(tmp_path / "in.jsonl", some_lines(NUM_LINES))
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    out.write_text("old\n")
    argv = [*command, "generate", "--model", folder, "--prompts", prompts, "--out", out, *OPTIONS]
    kept = 0
    for number, code in [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]:
        first = ["--fresh"] if number == signal.SIGKILL else []  # the journal remembers that the old file may go
        process = subprocess.Popen([*map(str, argv), *first], stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 600
            while num_kept(journal) < kept + 20:
                assert process.poll() is None, process.communicate()[1].decode()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            process.send_signal(number)
            shown = process.communicate(timeout=600)[1].decode()
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code
        assert out.read_text() == "old\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.journal"]
        kept = num_kept(journal)
        if number != signal.SIGKILL:
            expected = f"detspec: stopped by {number.name}: {kept} of {NUM_LINES} completions are kept in {journal}, "
            assert shown.splitlines()[-1] == f"{expected}and the same command resumes"
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=600, check=True)
    assert f"{NUM_LINES} requests, " in done.stderr
    assert f", {kept} of them before" in done.stderr
    assert json.loads((tmp_path / "out.stats.json").read_text())["num_resumed"] == kept
    assert not journal.exists()
    resumed = out.read_bytes()
    for extra, same in (((), True), (("--temperature", "0.6"), False)):  # the second is the inverse control
        assert generate(folder, prompts, out, "--fresh", *extra) == 0
        assert (out.read_bytes() == resumed) is same


def num_kept(journal: Path) -> int:
    """Whole entries in a journal."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


# In this process ------------------------------------------------------------------------------------------------------------


def generate(folder: Path, prompts: object, out: object, *extra: str) -> int:
    options = ("--no-compile-cache", *OPTIONS, *extra)
    return main(["generate", "--model", str(folder), "--prompts", str(prompts), "--out", str(out), *options])


@pytest.mark.slow
def test_without_compile_cache_nothing_is_kept_and_the_bytes_are_the_same(generated, folder, prompts, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("DETSPEC_COMPILE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert generate(folder, prompts, tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == generated.read_bytes()
    assert not (tmp_path / "cache").exists()


def test_sigterm_when_all_is_done_is_told_from_ctrl_c(folder, prompts, tmp_path, monkeypatch, capsys):
    leave = StopSignals.__exit__

    def terminated(*args) -> None:
        signal.raise_signal(signal.SIGTERM)  # before the handlers are restored
        leave(*args)

    monkeypatch.setattr(StopSignals, "__exit__", terminated)
    monkeypatch.setattr(cli_generate, "generate", lambda *_: 0)
    assert generate(folder, prompts, tmp_path / "out.jsonl") == 143
    assert capsys.readouterr().err == "detspec: stopped by SIGTERM\n"


def test_broken_logits_exit_with_1_and_name_the_requests(tmp_path, capsys):
    folder = write_folder(tmp_path / "model", broken_params(200))
    prompts = write_lines(
        tmp_path / "in.jsonl", [{"id": "a", "prompt_token_ids": [1]}, {"id": "broken", "prompt_token_ids": [200]}]
    )
    assert generate(folder, prompts, tmp_path / "out.jsonl") == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["id"], line["finish_reason"]) for line in found] == [("a", "length"), ("broken", "error")]
    assert capsys.readouterr().err.splitlines()[-1] == (
        "detspec: error: 1 requests failed, their logits are not finite or their lines say why: broken"
    )


@pytest.mark.parametrize(
    ("text", "extra", "message"),
    [
        ('{"id": "a"', (), "in.jsonl line 1: is not JSON"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', (), "line 2: id 'a' was already used on line 1"),
        ('{"id": "a", "prompt": "x", "temperature": 1}', (), "line 1: unknown key 'temperature'"),
        ('{"id": "a", "prompt": "' + "x" * 100 + '"}', (), "line 1: the prompt has 100 tokens"),
        ('{"id": "a", "prompt": "x"}', ("--temperature", "-1"), "sampling parameter temperature"),
        ('{"id": "a", "prompt": "x"}', ("--max-requests", "0"), "EngineConfig.max_requests"),
        ('{"id": "a", "prompt": "x"}', ("--method", "draft_model"), "--method draft_model needs --draft-model FOLDER"),
        ('{"id": "a", "prompt": "x"}', ("--draft-model", "thinking_parity"), "needs the same vocabulary"),
        ('{"id": "a", "prompt": "x"}', ("--max-len", "4096"), "max_len 4096 exceeds the 128 positions"),
        ("", (), "holds no requests"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_leaves_the_old_output(text, extra, message, folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "out.jsonl").write_text("old\n")
    assert generate(folder, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--fresh", *extra) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    *_, last = shown.err.splitlines()
    assert last.startswith("detspec: error: ")
    assert message in last
    assert shown.err.count("error") == 1
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_files_and_folders_that_are_not_there_are_refused(folder, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for argv, message in [
        ((folder, tmp_path / "no.jsonl", out), "no.jsonl: No such file"),
        ((folder, tmp_path, out), "is a folder without state.json"),
        ((folder, prompts, tmp_path), "is a folder"),
        ((folder, prompts, tmp_path / "no" / "out.jsonl"), "there is no folder"),
        ((tmp_path / "no model", prompts, out), "no model"),
    ]:
        assert generate(*argv) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert message in last
    assert list(tmp_path.iterdir()) == []


def test_openai_lines_are_answered_and_what_failed_is_named(folder, tmp_path, capsys):
    bodies = {"a": {"prompt": [1, 2], "max_tokens": 4}, "b": {"prompt": [1, 2], "best": 1}, "c": {"prompt": [3], "n": 2}}
    lines = [{"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body} for id, body in bodies.items()]
    files = ["--prompts", str(write_lines(tmp_path / "in.jsonl", lines)), "--out", str(tmp_path / "out.jsonl")]
    command = ["generate", "--no-compile-cache", "--model", str(folder), *files, "--max-requests", "2", "--max-len", "64"]
    assert main([*command, "--dry-run"]) == 0
    assert "rejected       1 lines" in capsys.readouterr().out
    assert main([*command, "--method", "none", "--created", "5"]) == 1
    assert f"error: 1 lines failed, see {tmp_path / 'out.errors.jsonl'}: b" in capsys.readouterr().err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [entry["custom_id"] for entry in found] == ["a", "c"]
    assert {entry["response"]["body"]["created"] for entry in found} == {5}
    assert main([*command, "--temperature", "0.5", "--fresh"]) == 2
    assert "leave out the options for temperature" in capsys.readouterr().err


@pytest.mark.slow
def test_draft_model_gives_the_same_bytes(generated, folder, prompts, tmp_path):
    options = ("--draft-model", str(folder), "--method", "draft_model", "--num-speculative-tokens", "3")
    assert generate(folder, prompts, tmp_path / "out.jsonl", *options) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == generated.read_bytes()
    last = json.loads((tmp_path / "out.stats.json").read_text())["last_start"]
    assert list(last["plans"]) == ["2x4 draft_model[2]"]
    assert last["draft_acceptance_rate"] > 0.9


def model_line(folder: Path) -> str:
    return f"model: {folder}, llama, {num_params(BYTE_CFG):,} parameters, bfloat16, digest {load(folder).digest[:12]}"


def test_file_that_the_shipped_model_answers_unasked_is_warned_about(prompts, tmp_path, capsys):
    command = ["generate", "--no-compile-cache", "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--dry-run"]
    warning = f"detspec: warning: no --model was given, so the small model that comes with detspec answers {prompts}"
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == warning
    assert shown.out.startswith("model          the shipped tiny_python, llama, 3,426,560 parameters, bfloat16, digest ")
    assert main([*command, "--model", "tiny_python"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_generate_that_is_complete_already_says_so(generated, folder, prompts, capsys):
    before = {path: path.read_bytes() for path in generated.parent.iterdir()}
    assert generate(folder, prompts, generated) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"detspec: loading the model {folder}",
        f"detspec: {model_line(folder)}",
        f"detspec: {generated} is already complete; --fresh generates it again",
    ]
    assert {path: path.read_bytes() for path in generated.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ((), "tiny_python, a small one that comes with detspec; --model names another"),
        (("--model", "thinking_parity"), "thinking_parity, a small one that comes with detspec"),
        (("--model", "no/such/folder"), "no/such/folder"),
    ],
)
def test_first_line_names_the_model(named, said, prompts, tmp_path, capsys, monkeypatch):
    def not_now(*_, **__):
        raise InputError("not now")

    monkeypatch.setattr("detspec.checkpoint.load.load", not_now)
    for command in (
        ["generate", "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")],
        ["bench"],
        ["serve"],
        ["doctor"],
    ):
        assert main([*command, *named]) == 2
        assert capsys.readouterr().err.splitlines() == [f"detspec: loading the model {said}", "detspec: error: not now"]


def test_dry_run_prints_the_plan_and_writes_nothing(folder, prompts, tmp_path, capsys):
    assert generate(folder, prompts, tmp_path / "out.jsonl", "--dry-run", "--shard", "1/2") == 0
    shown = capsys.readouterr()
    assert "2 of 4 lines (shard 1/2)" in shown.out
    assert "0 of 2 completions" in shown.out
    assert shown.err.splitlines() == [f"detspec: loading the model {folder}", f"detspec: {model_line(folder)}"]
    assert shown.out.startswith(f"{model_line(folder).replace(':', '         ')}, ")
    assert list(tmp_path.iterdir()) == []


def test_rejected_lines_exit_with_1_and_are_counted(folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("{\n")
    assert generate(folder, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--on-error", "reject") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"detspec: error: 1 lines were rejected, see {tmp_path / 'out.rejects.jsonl'}"
    )
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert json.loads((tmp_path / "out.rejects.jsonl").read_text())["raw"] == "{"
    assert generate(folder, tmp_path / "in.jsonl", "-", "--on-error", "reject") == 2
    assert "needs --out FILE" in capsys.readouterr().err


def test_merge_of_shards_is_the_output(folder, prompts, tmp_path, capsys):
    """Shards of no requests, because those need no compiling: what is merged is tested with the jobs."""
    (tmp_path / "in.jsonl").write_text("{\n[\n")
    assert main(["merge", "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "there are no shards of" in capsys.readouterr().err
    for shard in ("0/2", "1/2"):
        assert generate(folder, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--on-error", "reject", "--shard", shard) == 1
    assert main(["merge", "--out", str(tmp_path / "out.jsonl")]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "detspec: 0 requests, 0 tokens of 2 shards, 2 lines rejected"
    assert len((tmp_path / "out.rejects.jsonl").read_text().splitlines()) == 2
