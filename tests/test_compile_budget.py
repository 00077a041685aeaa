"""A test that has more programs compiled than it may fails, and its failure names it and them."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compile_budget import EVENT, FEW, CompileBudget


def item(*marks: pytest.Mark, folder: str = "somewhere") -> Any:
    """A test with these markers."""
    found = {mark.name: mark for mark in marks}
    path = Path("tests", folder, "test_it.py")
    return SimpleNamespace(nodeid="test_it.py::test_it", path=path, user_properties=[], get_closest_marker=found.get)


def judge(item: Any, test: Callable[[CompileBudget], None]) -> int:
    """Runs a test as pytest does; returns how many programs it had compiled."""
    budget = CompileBudget(forget=lambda: None)
    budget.pytest_runtest_logstart()
    call = budget.pytest_runtest_call(item)
    next(call)
    test(budget)
    with contextlib.suppress(StopIteration):
        next(call)
    return dict(item.user_properties)["programs"]


def compiling(number: int, name: str = "jit(step)") -> Callable[[CompileBudget], None]:
    """A test in which jax reports so many compilations."""

    def test(budget: CompileBudget) -> None:
        for _ in range(number):
            budget._count(EVENT, 0.1, fun_name=name)

    return test


def test_program_is_counted_when_it_is_compiled_and_single_operations_are_not():
    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return x * 3 + 1

    assert judge(item(), lambda _: (program(jnp.zeros(7)), program(jnp.ones(7)), jnp.zeros(7) * 5)) == 1
    assert judge(item(), compiling(2 * FEW, "jit(add)")) == judge(item(), compiling(2 * FEW, "jit(_where)")) == 0
    assert judge(item(), compiling(2 * FEW, "jit(scatter-add)")) == 0


def test_few_programs_pass_and_one_more_fails_by_name():
    assert judge(item(), compiling(FEW)) == FEW
    with pytest.raises(pytest.fail.Exception, match=rf"test_it.py::test_it has {FEW + 1} programs .* {FEW + 1} x jit\(step\)"):
        judge(item(), compiling(FEW + 1))


def test_declared_number_holds():
    declared = pytest.mark.programs(3 * FEW).mark
    assert judge(item(declared), compiling(3 * FEW)) == 3 * FEW
    with pytest.raises(pytest.fail.Exception, match=f"more than the {3 * FEW} that it may"):
        judge(item(declared), compiling(3 * FEW + 1))


def test_whole_commands_simulators_and_other_suites_are_not_judged():
    for mark in (pytest.mark.slow, pytest.mark.sweep, pytest.mark.kernels):
        assert judge(item(mark.mark), compiling(FEW + 1)) == FEW + 1
    assert judge(item(folder="aot"), compiling(FEW + 1)) == FEW + 1
