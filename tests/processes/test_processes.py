"""Two processes with two devices each: the bytes of one process with one device, whatever their clocks say and however they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes.together import ROOT, Job, finish, num_rounds

NUM_REQUESTS = 72
WITHIN_S = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that one process with one device has run: its output is `alone.jsonl`."""
    job = Job.write(tmp_path_factory.mktemp("job"), NUM_REQUESTS)
    job.run("alone.jsonl", 1)
    return job


def test_killed_process_ends_the_other_and_the_same_commands_give_the_bytes_of_one_process(job: Job):
    processes = job.start("killed.jsonl", 2)
    job.wait_for_completions("killed.jsonl", 8, processes)
    killed_at = time.monotonic()
    processes[1].kill()
    code, _, errors = finish(processes[0], WITHIN_S)
    finish(processes[1])
    assert code != 0, errors
    assert time.monotonic() - killed_at < WITHIN_S
    kept = (job.folder / "killed.jsonl.journal").read_bytes().count(b"\n") - 1
    assert 8 <= kept < NUM_REQUESTS
    assert not (job.folder / "killed.jsonl").exists()
    first, second = job.run("killed.jsonl", 2)
    assert first == second > 50
    assert job.bytes("killed.jsonl") == job.bytes("alone.jsonl")
    assert not (job.folder / "killed.jsonl.journal").exists()


@pytest.mark.slow
def test_killed_first_process_ends_the_other(job: Job):
    processes = job.start("first.jsonl", 2)
    job.wait_for_completions("first.jsonl", 8, processes)
    processes[0].kill()
    assert finish(processes[1], WITHIN_S)[0] != 0
    finish(processes[0])
    job.run("first.jsonl", 2)
    assert job.bytes("first.jsonl") == job.bytes("alone.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_signal_at_one_process_stops_both_after_the_same_round(job: Job, number: int):
    out = f"stopped{number}.jsonl"
    processes = job.start(out, 2)
    job.wait_for_completions(out, 8, processes)
    processes[number].send_signal(signal.SIGTERM)
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [143, 143], [errors for _, _, errors in ended]
    assert num_rounds(ended[0][1]) == num_rounds(ended[1][1])
    job.run(out, 2)
    assert job.bytes(out) == job.bytes("alone.jsonl")


@pytest.mark.slow
def test_process_that_is_stuck_is_left_by_the_other(job: Job):
    processes = job.start("stuck.jsonl", 2, DETSPEC_WATCHDOG_S="10")
    job.wait_for_completions("stuck.jsonl", 8, processes)
    processes[1].send_signal(signal.SIGSTOP)
    code, _, errors = finish(processes[0], WITHIN_S)
    processes[1].kill()
    finish(processes[1])
    assert code == 75, errors
    assert "nothing came from the device for 10 s" in errors
    assert 'File "' in errors  # where its threads are


@pytest.mark.slow
def test_processes_with_other_requests_refuse_to_start(job: Job, tmp_path: Path):
    other = Job.write(tmp_path, NUM_REQUESTS - 1)
    processes = job.start("other.jsonl", 2)
    processes[1].kill()
    finish(processes[1])
    processes[0].kill()
    finish(processes[0])
    assert other.folder != job.folder


def test_watchdog_ends_a_process_for_which_nothing_comes():
    code = "import time; from detspec.engine.watchdog import Watchdog; w = Watchdog('process 0 of 2', 0.5); "
    stuck = subprocess.run(
        [sys.executable, "-c", code + "w.expect(0.001); time.sleep(60)"], capture_output=True, text=True, cwd=ROOT
    )
    assert stuck.returncode == 75
    assert "process 0 of 2: nothing came from the device for 0 s" in stuck.stderr or "for 1 s" in stuck.stderr
    assert "time.sleep" not in stuck.stderr
    assert "Thread" in stuck.stderr
    for patient in ("w.expect(1.0)", "w.expect(0.001); w.rest()"):
        done = subprocess.run([sys.executable, "-c", f"{code}{patient}; time.sleep(2)"], cwd=ROOT, env=os.environ)
        assert done.returncode == 0
