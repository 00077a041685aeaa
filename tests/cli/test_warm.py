"""`detspec warm` compiles what a job needs, and the job compiles nothing more."""

from pathlib import Path

import pytest

from detspec.cli import main
from detspec.compile_cache import VARIABLE
from detspec.engine.compiled import Programs
from detspec.native.library import target
from tests.engine.byte_model import write_folder

OPTIONS = ("--max-requests", "1", "--max-len", "64", "--ordinary")


@pytest.mark.slow
def test_job_finds_all_its_programs_after_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    model = str(write_folder(tmp_path / "model"))
    folder = tmp_path / "programs"
    target("detspec_linear", "bfloat16")  # a process compiles its CPU kernels once, maybe in an earlier test
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr("detspec.engine.device.PROGRAMS", Programs())
    assert main(["warm", "--model", model, *OPTIONS]) == 0
    kept = sorted(folder.iterdir())
    *plans, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in plans] == [["ordinary[1]", "ordinary"], ["ordinary", "processing[1]", "ordinary"]]
    assert last.endswith(f"kept in {folder}: {len(kept)} programs, {sum(path.stat().st_size for path in kept) / 1e6:.1f} MB")
    assert len(kept) == 4  # reading, the plans, copies of pages

    monkeypatch.setattr("detspec.engine.device.PROGRAMS", Programs())
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "def"}\n')
    job = ["generate", "--model", model, "--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main([*job, "--max-tokens", "4", *OPTIONS]) == 0
    assert sorted(folder.iterdir()) == kept
    with monkeypatch.context() as patch:  # the control: a job with other options needs programs of its own
        patch.setattr("detspec.engine.device.PROGRAMS", Programs())
        assert main([*job, "--fresh", "--max-tokens", "4", *OPTIONS, "--max-len", "48"]) == 0
    assert len(list(folder.iterdir())) >= len(kept) + 2  # reading and a plan; copies of pages may still be compiling


def test_warm_without_a_cache_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "off")
    assert main(["warm", "--model", str(write_folder(tmp_path / "model")), "--no-compile-cache", *OPTIONS]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("s; kept nowhere: the compile cache is off")
