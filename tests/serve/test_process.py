"""`detspec serve` as a process: what it says, what a signal does, and that the log of it is audited by the command line."""

import concurrent.futures
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.engine.byte_model import write_folder

pytestmark = pytest.mark.slow
BODY = {"prompt": [5, 17, 9], "max_tokens": 50, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("serve") / "bytes")


@contextlib.contextmanager
def started(folder: Path, *args: str, first: str = "") -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that answers, and its address; its process runs the Python code `first` before all else."""
    python = [sys.executable, "-c", f"{first}\nimport runpy; runpy.run_module('detspec', run_name='__main__', alter_sys=True)"]
    command = [*python, "serve", "--model", str(folder), "--port", "0", "--lazy", "--max-len", "64"]
    with subprocess.Popen([*command, "--max-requests", "4", *args], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"detspec: loading the model {folder}\n"
        line = process.stderr.readline()
        found = re.search(r"serving bytes at (http://127\.0\.0\.1:\d+)", line)
        assert found is not None, line
        while httpx2.get(f"{found[1]}/health").status_code == 503:
            time.sleep(0.05)
        try:
            yield process, found[1]
        finally:
            process.kill()


# Says how many objects are hidden from the garbage collector once it is done.
TELLS_FROZEN = """
import gc, sys
freeze = gc.freeze
gc.freeze = lambda: (freeze(), print("frozen", gc.get_freeze_count(), file=sys.stderr))
"""


def test_signal_lets_what_is_in_flight_finish_and_the_log_is_audited(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    with started(folder, "--log", str(log), "--grace", "60", first=TELLS_FROZEN) as (process, url):
        assert process.stderr is not None
        assert int(process.stderr.readline().removeprefix("frozen ")) > 100_000  # jax alone brings more
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
    assert audited(log, folder) == 2


def audited(log: Path, folder: Path) -> int:
    """How many records of a log there are, all of which reproduce."""
    command = [sys.executable, "-m", "detspec", "audit", "--responses", str(log), "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(re.findall(r"reproduced\s+(\d+)", done.stdout)[0])


# In the place of a long text: 50 steps take 10 s at least, and what is tested happens after one.
SLOW = """
import time
from detspec.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.2), step(engine))[1]
"""
FAILING = """
from detspec.engine.engine import Engine
step = Engine.step
def fails(engine):
    updates = step(engine)
    if updates and updates[0].token_ids and updates[0].completion is None:
        raise RuntimeError("the device is gone")
    return updates
Engine.step = fails
"""


def events_of(url: str, first: Callable[[], object] = lambda: None) -> list[dict]:
    """The events of a stream, after whose first one `first` is called; it must end as HTTP wants it."""
    events = []
    with httpx2.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                first() if len(events) == 1 else None
    return events


def test_signal_aborts_what_takes_longer_than_the_grace(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    options = ("--log", str(log), "--grace", "0", "--segment-steps", "1")
    with started(folder, *options, first=SLOW) as (process, url):
        httpx2.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 1}, timeout=120)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(httpx2.post, f"{url}/v1/completions", json={**BODY, "logprobs": 0}, timeout=120)
            events = events_of(url, lambda: os.kill(process.pid, signal.SIGTERM))
            whole = waiting.result()
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert whole.status_code == 200
        (choice,) = whole.json()["choices"]
        assert (choice["finish_reason"], len(choice["logprobs"]["tokens"]) < 50) == ("abort", True)
        assert process.wait(60) == -signal.SIGTERM
    assert audited(log, folder) == 1  # what was aborted is not in it


def test_engine_that_fails_ends_streams_with_an_error_and_the_process_with_1(folder):
    with started(folder, "--segment-steps", "1", first=FAILING) as (process, url):
        *pieces, last = events_of(url)
        assert all("choices" in piece for piece in pieces)
        assert last["error"]["message"] == "the engine has ended: RuntimeError('the device is gone')"
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == f"detspec: error: {last['error']['message']}"
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")


# As a compiler that takes minutes: its threads are those that an ordinary exit waits for.
COMPILING = """
import threading
from detspec.engine.compiled import PROGRAMS
PROGRAMS._behind.submit(threading.Event().wait, 300)
"""


@pytest.mark.parametrize("ends", ["interrupted", "failed"])
def test_process_that_is_interrupted_or_fails_does_not_wait_for_the_compiler(folder, ends):
    first = COMPILING + (FAILING if ends == "failed" else "")
    with started(folder, "--segment-steps", "1", first=first) as (process, url):
        if ends == "failed":
            assert "error" in events_of(url)[-1]
        else:
            os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == (1 if ends == "failed" else 130)
        assert process.stderr is not None
        assert (
            process.stderr.read().splitlines()[-1].startswith(f"detspec: {'error: the engine' if ends == 'failed' else ends}")
        )


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are Linux's")
def test_full_disk_ends_the_process_with_3_and_leaves_a_log_that_is_audited(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    with started(folder, "--log", str(log)) as (process, url):
        assert httpx2.post(f"{url}/v1/completions", json=BODY, timeout=120).status_code == 200
        kept = log.read_bytes()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (len(kept) + 100, resource.RLIM_INFINITY))
        answer = httpx2.post(f"{url}/v1/completions", json={**BODY, "seed": 2}, timeout=120)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 500
        assert message.startswith(f"cannot write --log {log}: ")
        assert process.wait(60) == 3
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == f"detspec: error: {message}"
    assert log.read_bytes() == kept
    assert audited(log, folder) == 1


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
            ([], "DETSPEC_API_KEY is empty"),
        ):
            command = [sys.executable, "-m", "detspec", "serve", "--model", str(folder), *args]
            monkeypatch.setenv("DETSPEC_API_KEY", "" if "is empty" in message else "secret")
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 2
            assert message in done.stderr.splitlines()[-1]
