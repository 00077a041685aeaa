"""`detspec generate --shard auto` as clusters run it: several processes on one folder, killed at random moments."""

import contextlib
import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from detspec.cli.commands import main
from tests.engine.byte_model import some_prompts

pytestmark = pytest.mark.unoptimised
OPTIONS = ("--max-len", "64", "--max-requests", "2", "--method", "none", "--temperature", "0.7", "--max-tokens", "12")
NUM_LINES = 240


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


@pytest.mark.slow
def test_processes_killed_frozen_and_stopped_at_random_give_the_bytes_of_one(command, folder, tmp_path):
    """Three processes; whenever one is gone, another is started, until four were disturbed. No verdict depends on the clock."""
    prompts = write_lines(tmp_path / "in.jsonl", NUM_LINES)
    out = tmp_path / "out.jsonl"
    chunks = tmp_path / "out.jsonl.chunks"
    files = ("--model", folder, "--prompts", prompts, "--out", out)
    argv = list(
        map(str, (*command, "generate", *files, *OPTIONS, "--shard", "auto", "--double-check", "5%", "--chunk-lines", "4"))
    )
    rng = random.Random(0)
    how = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT]
    codes = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
    running = [subprocess.Popen(argv, stderr=subprocess.DEVNULL) for _ in range(3)]
    frozen = []
    deadline = time.monotonic() + 900
    try:
        for number in how:
            wanted = num_entries(chunks) + rng.randint(1, 25)
            while num_entries(chunks) < wanted:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            at_work = [process for process in running if list(chunks.glob(f"*-{process.pid}-*.alive"))]
            victim = rng.choice(at_work)
            running.remove(victim)
            victim.send_signal(number)
            if number == signal.SIGSTOP:
                frozen.append(victim)
            else:
                assert victim.wait(600) == codes[number]
            running.append(subprocess.Popen(argv, stderr=subprocess.DEVNULL))
        assert [process.wait(600) for process in running] == [0, 0, 0]
        for process in frozen:
            process.send_signal(signal.SIGCONT)
            assert process.wait(600) == 0
    finally:
        for process in (*running, *frozen):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    assert main(["merge", "--out", str(out)]) == 0
    whole = tmp_path / "whole.jsonl"
    for extra, same in (((), True), (("--temperature", "0.6"), False)):  # the second is the inverse control
        assert generate(folder, prompts, whole, "--fresh", *extra) == 0
        assert (out.read_bytes() == whole.read_bytes()) is same
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert stats["num_workers"] >= 3
    assert stats["num_compared"] > 0


def num_entries(chunks: Path) -> int:
    """Whole entries in all journals."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in chunks.glob("*.journal"))
