"""A system in its own process, which is stopped while others are measured."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from race_systems import Limits, Prompts
from race_systems.preparing import FailedError, import_path, last_line
from race_systems.systems import ENVIRONMENTS, System

ANSWER_LIMIT_S = 1800.0  # loading includes compiling


class Process:
    """The worker of one system; it runs within `turn` only, and leads a process group of its own."""

    def __init__(self, system: System, python: Path, folder: Path, limits: Limits) -> None:
        """Starts loading the model in `folder`."""
        self.system = system
        self.loaded: dict[str, Any] = {}
        self._log = folder / f"{system.name.replace(' ', '-')}.log"
        settings = {
            "module": system.module,
            "folder": str(folder),
            "limits": dataclasses.asdict(limits),
            "options": system.options,
            "packages": ENVIRONMENTS[system.environment].shown,
        }
        threads = {"OMP_NUM_THREADS": str(limits.num_threads)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "race_systems.worker", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **import_path(), **threads},
                start_new_session=True,
            )

    def wait_until_loaded(self) -> None:
        """Keeps what the worker says of itself: `load_s` and `versions`."""
        self.loaded = self._answer()

    def generate(self, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        """`seconds` and `tokens` of one call."""
        request = json.dumps({"prompts": prompts, "new_tokens": new_tokens})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says why
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        return self._answer()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the processes run. Stopped ones take no time of the CPU, even if their threads wait in a busy loop."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def peak_bytes(self) -> int:
        """The largest resident memory so far, summed over the processes of the group."""
        return sum(peak for group, peak in map(group_and_peak, Path("/proc").glob("[0-9]*")) if group == self._process.pid)

    def close(self) -> None:
        """Ends all processes of the group."""
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)[0]:
            raise FailedError(f"no answer within {ANSWER_LIMIT_S:.0f} s ({self._log})")
        line = self._process.stdout.readline()
        if not line:
            raise FailedError(f"it ended with status {self._process.wait()}: {last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise FailedError(f"{answer['error']} ({self._log})")
        return answer


def group_and_peak(process: Path) -> tuple[int, int]:
    """Process group and peak resident bytes of a folder of /proc; zeros if the process has ended."""
    try:
        group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
        lines = (process / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return group, 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
