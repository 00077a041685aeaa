"""Two processes with two devices each give the bytes of one with one, whatever their clocks say and however they end."""

import signal
import subprocess
import sys
import time

import pytest

from tests.processes.together import ROOT, Job, finish, num_segments

NUM_REQUESTS = 40
WITHIN_S = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that one process with one device has run: its output is `alone.jsonl`."""
    job = Job.write(tmp_path_factory.mktemp("job"), NUM_REQUESTS)
    job.run("alone.jsonl", 1)
    return job


@pytest.mark.slow
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


@pytest.mark.sweep
def test_killed_first_process_ends_the_other(job: Job):
    processes = job.start("first.jsonl", 2)
    job.wait_for_completions("first.jsonl", 8, processes)
    processes[0].kill()
    assert finish(processes[1], WITHIN_S)[0] != 0
    finish(processes[0])
    job.run("first.jsonl", 2)
    assert job.bytes("first.jsonl") == job.bytes("alone.jsonl")


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.sweep), pytest.param(1, marks=pytest.mark.slow)])
def test_signal_at_one_process_stops_both_after_the_same_segment(job: Job, number: int):
    out = f"stopped{number}.jsonl"
    processes = job.start(out, 2)
    job.wait_for_completions(out, 8, processes)
    processes[number].send_signal(signal.SIGTERM)
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [143, 143], [errors for _, _, errors in ended]
    assert num_segments(ended[0][1]) == num_segments(ended[1][1])
    job.run(out, 2)
    assert job.bytes(out) == job.bytes("alone.jsonl")


@pytest.mark.slow
def test_process_that_is_stuck_is_left_by_the_other(job: Job):
    processes = job.start("stuck.jsonl", 2, DETSPEC_WATCHDOG_S="20")  # more than one may compile longer than the other
    job.wait_for_completions("stuck.jsonl", 8, processes)
    processes[1].send_signal(signal.SIGSTOP)
    code, _, errors = finish(processes[0], 20 + WITHIN_S)
    processes[1].kill()
    finish(processes[1])
    assert code in (75, -signal.SIGABRT), errors  # jax may notice missing heartbeats before the watchdog does
    if code == 75:
        assert "nothing came from the device for 20 s" in errors
        assert 'File "' in errors  # where its threads are


@pytest.mark.slow
def test_processes_with_other_requests_refuse_to_start(job: Job):
    lines = (job.folder / "in.jsonl").read_text().splitlines(keepends=True)
    (job.folder / "fewer.jsonl").write_text("".join(lines[:-1]))
    processes = job.start("other.jsonl", 2, prompts=("in.jsonl", "fewer.jsonl"))
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [2, 2]
    assert "processes that share a mesh need the same job: prompts: process 1 has" in ended[1][2]
    assert not (job.folder / "other.jsonl").exists()


def test_watchdog_ends_a_process_for_which_nothing_comes_and_no_other():
    patient = "w.expect(0.02); time.sleep(0.8); w.rest(); time.sleep(0.8); print('waited', flush=True); "
    code = f"import time; from detspec.engine.watchdog import Watchdog; w = Watchdog('process 0 of 2', 0.5); {patient}"
    stuck = [sys.executable, "-c", f"{code}w.expect(0.0); time.sleep(60)"]
    ended = subprocess.run(stuck, capture_output=True, text=True, cwd=ROOT, timeout=WITHIN_S)
    assert ended.returncode == 75
    assert ended.stdout == "waited\n"
    assert "process 0 of 2: nothing came from the device for 0.5 s" in ended.stderr
    assert "most recent call first" in ended.stderr
