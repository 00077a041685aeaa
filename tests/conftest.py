"""Strictness for every test: no silent promotion of dtypes or ranks, no flaky deadlines, the CPU unless told otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; JAX_PLATFORMS=cuda runs the same tests on a GPU

import gc
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import hypothesis
import jax
import pytest

from detspec.engine.compiled import PROGRAMS
from detspec.native.processor import NO_COMPILER, find_compiler
from tests.compile_budget import CompileBudget

pytest_plugins = ["tests.engine.fixtures"]

# The processes of one run, those that tests start among them, share what they compile; what is dropped is found again.
RUN = os.environ.setdefault("DETSPEC_TEST_RUN", str(os.getpid()))  # the first process is the others' parent
MAPPINGS = Path("/proc/self/maps")
MAX_MAPPINGS = 30_000  # a file of tests takes up to some ten thousand
# Files that take half a minute in a suite, or have a test that does: begun last, they would leave other processes idle.
LONGEST = tuple(
    Path(__file__).parent / name
    for name in (
        "processes/test_processes.py",
        "promises/test_batch.py",
        "promises/test_drafts.py",
        "thinking/test_think_prompt.py",
        "engine/test_thinking.py",
        "test_soak.py",
        "test_native.py",
        "test_wheel.py",
        "promises/test_jobs.py",
        "doctor/test_doctor.py",
        "draft/test_int8_draft.py",
        "cli/test_generate.py",
    )
)
SUITES = ("kernels", "optimised", "slow", "sweep")  # marks that targets of the Makefile ask for
COMPILED = Path(tempfile.gettempdir()) / f"detspec-test-{RUN}"
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
os.environ.pop("DETSPEC_COMPILE_CACHE", None)  # jax's own cache holds all programs of the tests
os.environ["XDG_CACHE_HOME"] = str(COMPILED)  # and this folder the CPU kernels
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

gc.set_threshold(20_000, 20, 100)  # tracing makes objects by the million, and few of them are garbage

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A first example pays for a compilation, so time limits per example mean nothing.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def cpu_kernels() -> None:
    """Skips a test of what CPUs choose if they have kernels."""
    if find_compiler() is None:
        pytest.skip(NO_COMPILER)


def pytest_configure(config: pytest.Config) -> None:
    """Counts the programs that each test has compiled."""
    config.pluginmanager.register(CompileBudget(forget_programs), "compile_budget")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without a mark that `-m` asks for: each process would import all of them to take a test of ten."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    source = collection_path.read_text(encoding="utf-8")
    return True if any(f"mark.{name}" not in source for name in marks_asked_for(config.option.markexpr)) else None


def marks_asked_for(expression: str) -> list[str]:
    """The marks that a test must have for `expression`, as "slow" of "slow and not optimised"; none if it has alternatives."""
    return [] if " or " in expression else [name for name in expression.split(" and ") if name.isidentifier()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deals the files of two halves by turns to several processes, the longest first.

    Files of one folder need the same programs: side by side each process would compile them, one after the other the second
    finds them.
    """
    check_marks(items)
    if hasattr(config, "workerinput"):
        files = list(dict.fromkeys(item.path for item in items))
        half = -(-len(files) // 2)
        place = {path: (i % half, i >= half) for i, path in enumerate(files)}
        items.sort(key=lambda item: (item.path not in LONGEST, place[item.path]))


def check_marks(items: list[pytest.Item]) -> None:
    """Fails if the file of a test does not write a mark of the test: it would be left out, see `pytest_ignore_collect`."""
    marks = {(item.path, mark.name) for item in items for mark in item.iter_markers() if mark.name in SUITES}
    if hidden := sorted(f"{path} needs mark.{name}" for path, name in marks if f"mark.{name}" not in path.read_text("utf-8")):
        raise pytest.UsageError("marks are written in the file of their tests: " + ", ".join(hidden))


def pytest_collection_finish() -> None:
    """Imported modules stay: the garbage collector need not look at them at every turn."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Skips a test whose fixtures need the CPU kernels where there is no C compiler."""
    return (yield from skipped_without_compiler())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skips a test that needs the CPU kernels where there is no C compiler: all others run with what a user has there."""
    return (yield from skipped_without_compiler())


def skipped_without_compiler() -> Generator[None, object, object]:
    """Yields to a phase of a test; skips it if it failed for lack of a C compiler, itself or what it expected of an error."""
    try:
        return (yield)
    except Exception as failure:
        error: BaseException | None = failure
        while error is not None and NO_COMPILER not in str(error):
            error = error.__context__
        if error is None or find_compiler() is not None:
            raise
        pytest.skip(NO_COMPILER)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drops compiled programs at the end of a file of tests if there are many of them; else the next files find them.

    A program takes dozens of memory mappings, and Linux allows a process 65530: the whole suite in one process runs into it,
    and the compiler then ends with a segmentation fault.
    """
    if nextitem is not None and nextitem.path != item.path and (not MAPPINGS.exists() or num_mappings() > MAX_MAPPINGS):
        forget_programs()


def forget_programs() -> None:
    """Drops what this process has compiled."""
    PROGRAMS.forget()
    jax.clear_caches()
    gc.collect()


def num_mappings() -> int:
    """The memory mappings of this process."""
    return MAPPINGS.read_bytes().count(b"\n")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what was compiled, once the other processes have ended."""
    if str(os.getpid()) == RUN:
        shutil.rmtree(COMPILED, ignore_errors=True)
