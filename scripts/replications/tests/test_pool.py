"""The pool of processes: order, what is kept, and what a failure leaves; runs are one-line programs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.replications.pool import Run, RunFailed, read_result, run_all, write_result

RUNS = (Run("slow"), Run("timed", alone=True), Run("first"), Run("second", needs=("first",)))
PROGRAM = """
import json, os, sys, time
path, waited_for = sys.argv[1:]
began = time.time()
while waited_for and not os.path.exists(waited_for) and time.time() < began + 60:
    time.sleep(0.01)
with open(path, "w") as file:
    json.dump([began, time.time()], file)
"""


def program(workdir: Path, run: Run) -> list[str]:
    """Leaves when it began and ended; "slow" ends after "second", if that comes within a minute."""
    path, second = (workdir / name / "result.json" for name in (run.name, "second"))
    return ["-c", PROGRAM, str(path), str(second if run.name == "slow" else "")]


def run_them(workdir: Path, told: list[tuple[int, list[str]]]) -> None:
    run_all(
        RUNS,
        lambda run: program(workdir, run),
        workdir=workdir,
        width=2,
        listener=lambda done, names: told.append((done, list(names))),
    )


def test_pool_runs_needed_ones_first_and_timed_ones_alone_and_last(tmp_path: Path):
    told: list[tuple[int, list[str]]] = []
    run_them(tmp_path, told)
    times = {run.name: json.loads((tmp_path / run.name / "result.json").read_text()) for run in RUNS}
    assert times["second"][0] >= times["first"][1]
    assert times["timed"][0] >= max(times[name][1] for name in ("slow", "first", "second"))
    assert times["first"][0] < times["slow"][1]  # two ran side by side
    assert told[0] == (0, ["slow", "first"])
    assert told[-1] == (4, [])


def test_pool_that_is_started_again_runs_only_what_is_missing(tmp_path: Path):
    run_them(tmp_path, [])
    before = {run.name: os.stat(tmp_path / run.name / "result.json").st_mtime_ns for run in RUNS}
    (tmp_path / "second" / "result.json").unlink()
    told: list[tuple[int, list[str]]] = []
    run_them(tmp_path, told)
    after = {run.name: os.stat(tmp_path / run.name / "result.json").st_mtime_ns for run in RUNS}
    assert {name for name in before if before[name] != after[name]} == {"second"}
    assert told[0] == (3, ["second"])


def test_processes_have_huge_pages_and_one_thread_beside_what_the_user_asks_for(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=nowhere")
    path = tmp_path / "only" / "result.json"
    code = f"import json,os; json.dump(dict(os.environ), open({str(path)!r}, 'w'))"
    run_all([Run("only")], lambda run: ["-c", code], workdir=tmp_path, width=1, listener=lambda done, names: None)
    found = json.loads(path.read_text())
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.check=0:glibc.malloc.hugetlb=1"
    assert found["XLA_FLAGS"] == "--xla_dump_to=nowhere --xla_cpu_multi_thread_eigen=false"


@pytest.mark.parametrize("code", ["import sys; print('no disk'); sys.exit(3)", "print('no disk')"])
def test_run_that_leaves_no_result_fails_the_pool_and_ends_the_others(tmp_path: Path, code: str):
    started, ended = tmp_path / "started", tmp_path / "ended"
    wait = f"import os, time\nwhile not os.path.exists({str(started)!r}): time.sleep(0.01)\n"
    long = f"import time; open({str(started)!r}, 'w').close(); time.sleep(60); open({str(ended)!r}, 'w').close()"
    with pytest.raises(RunFailed, match=r"(?s)bad ended with exit code .*no disk"):
        run_all(
            [Run("long"), Run("bad")],
            lambda run: ["-c", wait + code if run.name == "bad" else long],
            workdir=tmp_path,
            width=2,
            listener=lambda done, names: None,
        )
    assert started.exists()
    assert not ended.exists()


POOL = """
import signal, sys
from pathlib import Path
from scripts.replications.pool import Run, run_shown
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
long = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"
workdir = Path(sys.argv[1])
ok = run_shown([Run("long")], lambda run: ["-c", long, str(workdir / "pid")], workdir=workdir, width=1)
sys.exit(0 if ok else 1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_pool_that_is_stopped_ends_its_runs(tmp_path: Path, number: signal.Signals):
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", POOL, str(tmp_path)], stdout=subprocess.PIPE, text=True) as pool:
        try:
            deadline = time.monotonic() + 60
            while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
                time.sleep(0.01)
            pool.send_signal(number)
            output, _ = pool.communicate(timeout=60)
        finally:
            pool.kill()
    assert pool.returncode == 1
    assert "the same command continues" in output
    with pytest.raises(ProcessLookupError):  # its own child, which it has waited for
        os.kill(int(pid.read_text()), 0)


def test_result_is_read_as_it_was_written(tmp_path: Path):
    write_result(tmp_path / "new", {"found": [1, 2]})
    assert read_result(tmp_path / "new") == {"found": [1, 2]}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]
