"""Two processes with two devices each give the bytes of one with one, whatever their clocks say and however they end."""

import signal
import subprocess
import sys

import pytest

from tests.processes.together import ROOT, Job, finish, num_segments

NUM_REQUESTS = 40
WATCHDOG_S = 20
WITHIN_S = 110  # less than the 120 s after which the watchdog would end a process, if it were not told otherwise


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that one process with one device has run: its output is `alone.jsonl`."""
    job = Job.write(tmp_path_factory.mktemp("job"), NUM_REQUESTS)
    job.run("alone.jsonl", 1)
    return job


def begin(job: Job, out: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Starts two processes, and waits until they have completed four requests more."""
    processes = job.start(out, 2, **environment)
    job.wait_for_completions(out, num_kept(job, out) + 4, processes)
    return processes


def num_kept(job: Job, out: str) -> int:
    """Completions in the journal of `out`."""
    journal = job.folder / f"{out}.journal"
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


@pytest.mark.slow
def test_process_that_is_stuck_killed_or_signalled_ends_both_and_the_same_commands_give_the_bytes_of_one_process(job: Job):
    """A job is interrupted three times. Stuck comes first: later the first process finds programs, and waits for the other."""
    out = "interrupted.jsonl"
    processes = begin(job, out, DETSPEC_WATCHDOG_S=str(WATCHDOG_S))  # more than one may compile longer than the other
    processes[1].send_signal(signal.SIGSTOP)
    code, _, errors = finish(processes[0], WATCHDOG_S + WITHIN_S)
    processes[1].kill()
    finish(processes[1])
    assert code in (75, -signal.SIGABRT), errors  # jax may notice missing heartbeats before the watchdog does
    if code == 75:
        assert f"nothing came from the device for {WATCHDOG_S} s" in errors
        assert 'File "' in errors  # where its threads are

    processes = begin(job, out)
    processes[1].kill()
    code, _, errors = finish(processes[0], WITHIN_S)
    finish(processes[1])
    assert code != 0, errors
    assert not (job.folder / out).exists()

    stop_by_signal(begin(job, out), 1)
    assert 12 <= num_kept(job, out) < NUM_REQUESTS
    first, second = job.run(out, 2)
    assert first == second > 50
    assert job.bytes(out) == job.bytes("alone.jsonl")
    assert not (job.folder / f"{out}.journal").exists()


def stop_by_signal(processes: list[subprocess.Popen[str]], number: int) -> None:
    """A signal at one of them stops both after the same segment."""
    processes[number].send_signal(signal.SIGTERM)
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [143, 143], [errors for _, _, errors in ended]
    assert num_segments(ended[0][1]) == num_segments(ended[1][1])


@pytest.mark.sweep
def test_killed_first_process_ends_the_other(job: Job):
    processes = begin(job, "first.jsonl")
    processes[0].kill()
    assert finish(processes[1], WITHIN_S)[0] != 0
    finish(processes[0])
    job.run("first.jsonl", 2)
    assert job.bytes("first.jsonl") == job.bytes("alone.jsonl")


@pytest.mark.sweep
def test_signal_at_the_first_process_stops_both_after_the_same_segment(job: Job):
    stop_by_signal(begin(job, "stopped.jsonl"), 0)
    job.run("stopped.jsonl", 2)
    assert job.bytes("stopped.jsonl") == job.bytes("alone.jsonl")


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
    patient = "w.expect(0.1); time.sleep(0.8); w.rest(); time.sleep(0.8); print('waited', flush=True); "
    code = f"import time; from detspec.engine.watchdog import Watchdog; w = Watchdog('process 0 of 2', 0.5); {patient}"
    stuck = [sys.executable, "-c", f"{code}w.expect(0.0); time.sleep(60)"]
    ended = subprocess.run(stuck, capture_output=True, text=True, cwd=ROOT, timeout=WITHIN_S)
    assert ended.returncode == 75
    assert ended.stdout == "waited\n"
    assert "process 0 of 2: nothing came from the device for 0.5 s" in ended.stderr
    assert "most recent call first" in ended.stderr
