"""Processes that run `detspec`: started anew or forked, with right or wrong clocks, with room for files or without.

Importing jax takes longer than a small job. So most processes are forks of this one, which has imported all and has started
nothing: it must never touch a device itself.
"""

import contextlib
import dataclasses
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from detspec.cli import commands
from detspec.engine import engine  # noqa: F401  # forks find it imported
from detspec.jobs import audit, dry_run, job, merge  # noqa: F401  # and these
from detspec.native.library import DTYPES, target
from scripts.soak.caches import use_cache
from scripts.soak.clocks import wrong_clocks
from scripts.soak.devices import be_patient

FAILED = 70  # exit code of a fork that raised
POLL_S = 0.003
MOST_SAID = 4000  # bytes


class UnexpectedError(Exception):
    """A process ended as none should."""


@dataclasses.dataclass(frozen=True)
class Start:
    """How a process runs.

    Attributes:
        arguments: what follows `detspec` on the command line.
        cache: folder for compiled programs.
        compiles_anew: the folder is empty, and no other is looked into.
        is_forked: a fork of this process; else Python starts anew.
        clock_seed: seed of clocks that jump, which only forks can have; None for right ones.
        file_bytes: most bytes of a file that it writes, as if the disk were full then; None for no limit.
    """

    arguments: tuple[str, ...]
    cache: Path
    compiles_anew: bool = False
    is_forked: bool = True
    clock_seed: int | None = None
    file_bytes: int | None = None


class Process:
    """A process that runs, or has ended."""

    def __init__(self, target_fn: Callable[[], int]) -> None:
        """Forks; the fork calls `target_fn` and ends with what that returns."""
        self._code: int | None = None
        self._said = b""
        sys.stdout.flush()
        sys.stderr.flush()
        self._pipe, its_end = os.pipe()  # and not a file, which a limit on bytes would be for, too
        self.pid = os.fork()
        if not self.pid:
            _run(target_fn, its_end)
        os.close(its_end)
        os.set_blocking(self._pipe, False)

    @classmethod
    def of(cls, start: Start) -> "Process":
        """A process of `detspec`."""
        return cls(lambda: _detspec(start))

    @property
    def said(self) -> str:
        """The end of what it wrote to its standard output and error so far."""
        return self._said.decode(errors="replace")

    def code(self) -> int | None:
        """The exit code, or less than 0 for the signal that ended it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            with contextlib.suppress(BlockingIOError):
                while some := os.read(self._pipe, 1 << 16):
                    self._said = (self._said + some)[-MOST_SAID:]
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self._pipe)
        return self._code

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        while (code := self.code()) is None:
            time.sleep(POLL_S)
        return code

    def succeed(self) -> None:
        """Waits for the end; raises `UnexpectedError` with what was said if the exit code is not 0."""
        if code := self.wait():
            raise UnexpectedError(f"exit code {code}:\n{self.said}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self.code() is None:
            os.kill(self.pid, number)


def _run(target_fn: Callable[[], int], output: int) -> None:
    """The life of a fork, whose output goes to a file descriptor; does not return."""
    code = FAILED
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = target_fn()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _detspec(start: Start) -> int:
    """Runs the command line in this process."""
    use_cache(start.cache, alone=start.compiles_anew)
    if "--chips" in start.arguments:
        be_patient()
    if start.file_bytes is not None:
        for dtype in DTYPES:  # a C compiler that has no room for its files ends as if it were broken
            target("attention", dtype)
        resource.setrlimit(resource.RLIMIT_FSIZE, (start.file_bytes, resource.RLIM_INFINITY))
    if not start.is_forked:
        os.execv(sys.executable, [sys.executable, "-m", "detspec", *start.arguments])
    with wrong_clocks(start.clock_seed):
        return commands.main(list(start.arguments))
