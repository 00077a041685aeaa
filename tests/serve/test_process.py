"""`detspec serve` as a process: what it says, what a signal does, and that the log of it is audited by the command line."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.engine.byte_model import write_folder

pytestmark = [pytest.mark.slow, pytest.mark.unoptimised]
BODY = {"prompt": [5, 17, 9], "max_tokens": 50, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("serve") / "bytes")


@contextlib.contextmanager
def started(folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that answers, and its address."""
    command = [sys.executable, "-m", "detspec", "serve", "--model", str(folder), "--port", "0", "--lazy", "--max-len", "64"]
    with subprocess.Popen([*command, "--max-requests", "4", *args], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"serving bytes at (http://127\.0\.0\.1:\d+)", line)
        assert found is not None, line
        while httpx2.get(f"{found[1]}/health").status_code == 503:
            time.sleep(0.05)
        try:
            yield process, found[1]
        finally:
            process.kill()


def test_signal_lets_what_is_in_flight_finish_and_the_log_is_audited(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    with started(folder, "--log", str(log), "--grace", "60") as (process, url):
        whole = httpx2.post(f"{url}/v1/completions", json=BODY, timeout=120).json()["choices"][0]["text"]
        with httpx2.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=120) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            os.kill(process.pid, signal.SIGTERM)
            events = [json.loads(line.removeprefix("data: ")) for line in [first, *lines] if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        assert process.wait(60) == -signal.SIGTERM  # a shell reports 143
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")
    command = [sys.executable, "-m", "detspec", "audit", "--responses", str(log), "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, re.findall(r"reproduced\s+(\d+)", done.stdout)) == (0, ["2"])


def test_key_comes_from_the_environment_and_bad_options_are_one_line(folder, monkeypatch):
    monkeypatch.setenv("DETSPEC_API_KEY", "secret")
    with started(folder) as (_, url):
        assert httpx2.post(f"{url}/v1/completions", json=BODY).status_code == 401
        allowed = httpx2.post(f"{url}/v1/completions", json=BODY, headers={"authorization": "Bearer secret"}, timeout=120)
        assert allowed.status_code == 200
        port = url.rpartition(":")[2]
        for args, message in (
            (["--port", port], "cannot be listened at"),
            (["--weights-dir", "/none"], "there is no such folder"),
        ):
            command = [sys.executable, "-m", "detspec", "serve", "--model", str(folder), *args]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 2
            assert message in done.stderr.splitlines()[-1]
