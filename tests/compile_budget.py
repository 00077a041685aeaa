"""A run of all tests fails if the tests of a folder have more programs compiled than they are allowed.

Tracing and compiling are two thirds of what tests take. A new shape costs a second or two, several where the compiler
optimises, and one more is easily overlooked, so they are counted. A program that comes from jax's cache counts, too: which of
two processes finds it there depends on the order of files.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

EVENT = "/jax/core/compile/backend_compile_duration"
ROOT = Path(__file__).parents[1]
BUDGET = {  # a quarter more than were counted when it was written, at most: a process that met like shapes before has fewer
    "tests/engine": 600,
    "tests/generation": 440,
    "tests/ops": 860,  # most are single operations, and fast
    "tests/train": 290,
    "tests/checkpoint": 290,
    "tests/thinking": 220,
    "tests": 260,  # a third of them by stages of the device script, at tiny sizes
    "tests/model": 130,
    "tests/draft": 240,
    "tests/doctor": 220,
    "tests/cli": 80,
    "scripts/replications/thinking_states/tests": 60,  # 44 alone: a training step is three programs
    "tests/mesh": 400,  # a run of its own, which is not judged
    "tests/serve": 150,  # 66 alone, 108 in two processes
    "tests/evals": 120,  # a run of its own
    "tests/adapters": 64,  # 51 alone
    "tests/jobs": 95,  # 71 alone, 45 to 76 in runs of all tests
}
OTHERS = 40


class CompileBudget:
    """Counts programs by folder; a process that only collects adds up what the others have counted."""

    def __init__(self, is_whole: bool) -> None:
        self.is_whole = is_whole  # all tests were asked for
        self.counts: Counter[str] = Counter()
        self._folder = ""
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, _duration: float, **_: Any) -> None:
        if event == EVENT and self._folder:
            self.counts[self._folder] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, location: tuple[str, int | None, str]) -> None:
        """Remembers which folder's test runs."""
        self._folder = str(Path(location[0]).parent)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hands the counts over, or judges them."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["compiled"] = dict(self.counts)
        elif self.is_whole and self.above():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_testnodedown(self, node: Any) -> None:
        """Adds what a process has counted."""
        self.counts.update(getattr(node, "workeroutput", {}).get("compiled", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says who compiles too much; with -v how much everybody compiles."""
        if terminalreporter.verbosity > 0 or self.above():
            for folder, count in self.counts.most_common():
                terminalreporter.write_line(f"{folder}: {count} programs of {BUDGET.get(folder, OTHERS)}")
        if self.is_whole:
            for line in self.above():
                terminalreporter.write_line(line, red=True)

    def above(self) -> list[str]:
        """Folders that are above their budgets, in words."""
        return [
            f"the tests in {folder} compile {count} programs, more than the allowed {BUDGET.get(folder, OTHERS)}: take "
            "shapes from tests/shelf.py, or raise the budget in tests/compile_budget.py and say why"
            for folder, count in self.counts.items()
            if count > BUDGET.get(folder, OTHERS)
        ]
