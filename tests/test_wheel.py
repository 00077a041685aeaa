"""The wheel has all that its commands need: it runs outside of the repository, next to the packages of this environment."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = """
import detspec as ds
print(ds.__file__)
engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=2, max_len=64))
outs = engine.generate(["def fib(n):", [5, 17, 9]], ds.SamplingParams(max_tokens=8, temperature=0.8, seed=7))
assert [len(out.token_ids) for out in outs] == [8, 8] and outs[0].text
"""
SIZE = ("--max-requests", "2", "--max-len", "64")  # the programs of the quickstart


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command, which must succeed."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_runs_outside_of_the_repository(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    bin = tmp_path / "env" / "bin"
    run(sys.executable, "-m", "pip", "--python", bin / "python", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    own = run(bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    below = sysconfig.get_path("purelib")  # the packages that detspec needs
    (Path(own) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    assert run(bin / "python", "-c", QUICKSTART, cwd=tmp_path).startswith(own)
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "prompt": "import os"}) + "\n")
    run(bin / "detspec", "generate", "--prompts", "in.jsonl", "--out", "out.jsonl", *SIZE, "--max-tokens", "4", cwd=tmp_path)
    run(bin / "detspec", "audit", "--records", "out.jsonl", *SIZE[:2], cwd=tmp_path)
