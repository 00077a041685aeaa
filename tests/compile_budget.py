"""A test fails if it has more programs compiled than it may: a few, or as many as `@pytest.mark.programs(number)` declares.

Tracing and compiling are two thirds of what tests take. A new shape costs a second or two, several where the compiler
optimises, and one more is easily overlooked, so they are counted, as equinox bounds traces.

What counts: the programs that this process takes while the test and its fixtures run, also those that the cache on the disk
has. What does not: single operations of jax (`jit(add)`), and what processes that the test starts compile. A test takes most
programs if it runs alone; after others it takes fewer. So a number that holds for it alone holds in any order and on any number
of processes, and `DETSPEC_TEST_ALONE=1 pytest -rA -k NAME` says that number: every test then begins with nothing compiled.

Whole commands (`slow`, `sweep`), simulators (`kernels`) and the folders whose subject is to compile are not judged.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

EVENT = "/jax/core/compile/backend_compile_duration"
FEW = 24  # an engine takes up to ten, and a test may compare two
NOT_JUDGED = ("slow", "sweep", "kernels")
OTHER_SUITES = ("aot", "evals", "parity", "trainers")  # folders with targets and packages of their own
OPERATIONS = {*dir(jax.lax), *dir(jax.numpy), "ffi_call", "stage"}


def is_operation(name: str) -> bool:
    """Whether a compiled function's name, as "jit(add)", is that of a single operation of jax."""
    inner = name.removeprefix("jit(").removesuffix(")")
    return inner.startswith("_") or inner.replace("-", "_") in OPERATIONS


def allowed(item: pytest.Item) -> int | None:
    """How many programs a test may have compiled; None for any number."""
    if item.path.parent.name in OTHER_SUITES or any(item.get_closest_marker(name) for name in NOT_JUDGED):
        return None
    declared = item.get_closest_marker("programs")
    return FEW if declared is None else declared.args[0]


class CompileBudget:
    """Counts the programs of the test that runs; `forget` drops what earlier tests compiled."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self.names: Counter[str] = Counter()
        self._forget = forget if os.environ.get("DETSPEC_TEST_ALONE") else None
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, _duration: float, **about: Any) -> None:
        name = about.get("fun_name", "")
        if event == EVENT and not is_operation(name):
            self.names[name] += 1

    def pytest_runtest_logstart(self) -> None:
        """Begins to count for a test, before its fixtures are made."""
        if self._forget:
            self._forget()
        self.names.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fails a test that has passed, if it had too many programs compiled."""
        yield
        count = self.names.total()
        item.user_properties.append(("programs", count))
        most = allowed(item)
        if most is not None and count > most:
            each = ", ".join(f"{number} x {name}" for name, number in self.names.most_common())
            pytest.fail(
                f"{item.nodeid} has {count} programs compiled, more than the {most} that it may: {each}. Take shapes from "
                f"tests/shelf.py, or declare more with @pytest.mark.programs({count}) and say why",
                pytrace=False,
            )
        if self._forget:
            print(f"programs: {count}")
