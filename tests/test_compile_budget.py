"""A folder whose tests compile more programs than they are allowed fails the run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.compile_budget import OTHERS, CompileBudget


def session() -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)


def test_programs_are_counted_for_the_folder_whose_test_runs():
    found = CompileBudget(is_whole=True)
    found.pytest_runtest_logstart(("tests/elsewhere/test_it.py", 1, "test_it"))
    jax.jit(lambda x: x * 3 + 1)(jnp.zeros(7))
    assert set(found.counts) == {"tests/elsewhere"}
    assert found.above() == []


@pytest.mark.parametrize(("is_whole", "more", "fails"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_run_of_all_tests_fails_above_the_budget_and_a_part_of_them_does_not(is_whole, more, fails):
    found = CompileBudget(is_whole=is_whole)
    for _ in range(2):  # two processes, half of the programs each
        found.pytest_testnodedown(SimpleNamespace(workeroutput={"compiled": {"tests/elsewhere": (OTHERS + 2 * more) // 2}}))
    ended = session()
    found.pytest_sessionfinish(ended)
    assert (ended.exitstatus != pytest.ExitCode.OK) == fails
    assert bool(found.above()) == bool(more)
