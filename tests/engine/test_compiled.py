"""Programs that come from memory, from files or from the compiler give the same bits."""

import contextlib
import ctypes
import os
import platform
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from detspec.compile_cache import VARIABLE, CompileCache
from detspec.engine import programs
from detspec.engine.compiled import ProgramCall, Programs, return_freed
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import SCHEDULE, byte_params, facts, without_tokenizer


@pytest.fixture(scope="module")
def model():
    return without_tokenizer(byte_params())


def test_new_engine_compiles_nothing_but_its_pools_and_on_a_cpu_nothing(model, caplog):
    """Arrays that numpy makes are put on the device; each shape that jax fills or copies would be a program."""
    with jax.log_compiles():
        engine = Engine(model, EngineConfig(max_requests=5, max_len=80, schedule=SCHEDULE))
        engine.replicas[0].device.clear()
    compiled = {record.getMessage().split()[1] for record in caplog.records if record.getMessage().startswith("Compiling ")}
    assert compiled == (set() if jax.default_backend() == "cpu" else {"jit(broadcast_in_dim)"})


@contextlib.contextmanager
def fresh_process(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """This process has compiled nothing, keeps its programs in `folder`, and jax keeps none."""
    of_all_tests = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        patch.setattr("detspec.engine.device.PROGRAMS", Programs())
        patch.setattr("detspec.engine.compiled._from_jax", set())
        keep_in(None)
        yield patch
        keep_in(of_all_tests)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of programs of a process that begins without any."""
    with fresh_process(tmp_path / "programs"):
        yield tmp_path / "programs"


@pytest.fixture(scope="module")
def first_process(model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple]]:
    """The folder that a first process leaves, and its answers."""
    folder = tmp_path_factory.mktemp("first") / "programs"
    with fresh_process(folder) as patch:
        return folder, answers(model, patch)


@pytest.fixture
def first(first_process: tuple[Path, list[tuple]], folder: Path) -> list[tuple]:
    """The answers of a first process, whose programs are in `folder`."""
    kept, found = first_process
    shutil.copytree(kept, folder)
    return found


def keep_in(folder: str | None) -> None:
    """Lets jax keep what it compiles in `folder`, or nowhere."""
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def answers(model, monkeypatch) -> list[tuple]:
    """Answers of an engine in a process that has compiled nothing."""
    monkeypatch.setattr("detspec.engine.device.PROGRAMS", Programs())
    engine = Engine(model, EngineConfig(max_requests=2, max_len=48, method="none", schedule=SCHEDULE))
    sampling = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=7, temperature=0.9, seed=3)]
    return [facts(completion) for completion in engine.generate([[1, 2, 3], [200]], sampling)]


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("this program should have come from a file")

    monkeypatch.setattr("jax.stages.Lowered.compile", refuse)


def test_next_process_compiles_nothing_and_gives_the_same_bits(model, folder, first, monkeypatch):
    assert len(list(folder.iterdir())) == 3  # reading, decoding, copies of pages
    forbid_compiling(monkeypatch)
    assert answers(model, monkeypatch) == first


@pytest.mark.usefixtures("first")
def test_another_shape_is_another_program(model, monkeypatch):
    """The control of the test above: nothing is taken for what it is not."""
    forbid_compiling(monkeypatch)
    engine = Engine(model, EngineConfig(max_requests=2, max_len=49, method="none", schedule=SCHEDULE))
    with pytest.raises(AssertionError, match="should have come from a file"):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


def test_without_a_cache_nothing_is_written(model, folder, monkeypatch):
    monkeypatch.setattr("detspec.engine.device.PROGRAMS", Programs())
    config = EngineConfig(max_requests=2, max_len=48, method="none", schedule=SCHEDULE, compile_cache=False)
    Engine(model, config).generate([[1], [2]], SamplingParams(max_tokens=2))
    assert not folder.exists()


def test_poisoned_files_are_compiled_again_and_give_the_same_bits(model, folder, first, monkeypatch):
    """Two are cut, and one is whole, but no program."""
    cut, foreign, also_cut = folder.iterdir()
    for path in (cut, also_cut):
        path.write_bytes(path.read_bytes()[:1000])
    CompileCache(folder).write(foreign.stem, b"no pickle of a program")
    with pytest.warns(UserWarning, match="It is compiled again") as warned:
        assert answers(model, monkeypatch) == first
    reasons = [str(warning.message).split("is not used: ")[1].split(".")[0].split(" (")[0] for warning in warned]
    assert sorted(reasons) == ["it cannot be loaded", "it is damaged", "it is damaged"]
    forbid_compiling(monkeypatch)
    assert answers(model, monkeypatch) == first


@pytest.mark.slow
def test_program_that_jax_keeps_is_not_written_once_more(model, folder, monkeypatch, tmp_path):
    """A program that jax loads from its own cache cannot be written whole: its file would be found, and fail when it runs."""
    keep_in(str(tmp_path / "of jax"))
    jax.clear_caches()  # what this process compiled before
    first = answers(model, monkeypatch)
    assert len(list(folder.iterdir())) == 3
    for path in folder.iterdir():
        path.unlink()  # as when they are the least recently used
    jax.clear_caches()  # another process
    assert answers(model, monkeypatch) == first
    assert list(folder.iterdir()) == []
    jax.clear_caches()  # other tests write what they compile


def test_one_program_for_equal_calls_and_another_for_other_shapes():
    double = jax.jit(lambda x: 2 * x)
    found = Programs()
    begun = [found.start(ProgramCall(double, None, (jnp.zeros(size),), {}), None) for size in (3, 3, 4)]
    assert begun[0] is begun[1]
    assert begun[0] is not begun[2]
    assert begun[2].result()(jnp.ones(4)).tolist() == [2.0] * 4
    found.forget()
    assert found.start(ProgramCall(double, None, (jnp.zeros(3),), {}), None) is not begun[0]


def test_second_program_is_traced_while_the_first_compiles():
    """The first one's compilation waits until the second has been traced; one after the other, this would never end."""
    was_traced = threading.Event()

    class Slow:
        __name__ = "slow"

        def lower(self, *args):
            return SimpleNamespace(compile=lambda: was_traced.wait(60))

    class Fast:
        __name__ = "fast"

        def lower(self, *args):
            was_traced.set()
            return SimpleNamespace(compile=lambda: "compiled")

    found = Programs()
    slow, fast = (found.start(ProgramCall(fn, None, (jnp.zeros(1),), {}), None) for fn in (Slow(), Fast()))
    assert slow.result(60) is True
    assert fast.result(60) == "compiled"


def test_memory_is_returned_when_the_last_program_is_there(monkeypatch):
    """Not while the second one is being made, though the first is there."""
    both_begun, may_end, returned = threading.Event(), threading.Event(), threading.Event()

    class Quick:
        __name__ = "quick"

        def lower(self, *args):
            return SimpleNamespace(compile=lambda: both_begun.wait(60))

    class Waiting:
        __name__ = "waiting"

        def lower(self, *args):
            return SimpleNamespace(compile=lambda: may_end.wait(60))

    monkeypatch.setattr("detspec.engine.compiled.return_freed", returned.set)
    found = Programs()
    quick, waiting = (found.start(ProgramCall(fn, None, (jnp.zeros(1),), {}), None) for fn in (Quick(), Waiting()))
    both_begun.set()
    assert quick.result(60) is True
    assert not returned.wait(0.2)
    may_end.set()
    assert waiting.result(60) is True
    assert returned.wait(60)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="return_freed asks glibc alone")
def test_return_freed_gives_memory_back():
    """64 MB in pieces. The last one stays, so glibc keeps those before it after they are freed, until it is asked."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    size, number = 1 << 16, 1 << 10

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pieces = [libc.malloc(size) for _ in range(number)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    used = resident_bytes()
    for piece in pieces[:-1]:
        libc.free(piece)
    kept = resident_bytes()
    return_freed()
    returned = resident_bytes()
    libc.free(pieces[-1])
    assert used - kept < size * number / 8
    assert kept - returned > size * number * 3 / 4


@pytest.mark.slow
def test_function_that_was_replaced_is_another_program(model, first, monkeypatch):
    """An ablation that replaces a function gets what it asks for, and leaves nothing to those who do not."""
    with monkeypatch.context() as patch:
        patch.setattr("detspec.sampler.logprobs_at", lambda logits, tokens, sum_row: jnp.full(tokens.shape, -1.0))
        programs.run_segment.clear_cache()
        programs.read_sequences.clear_cache()
        programs.prefill_sequences.clear_cache()
        changed = answers(model, monkeypatch)
    assert [tokens for tokens, *_ in changed] == [tokens for tokens, *_ in first]
    assert set(np.frombuffer(b"".join(bits for _, bits, _ in changed), np.float32)) == {-1.0}
    programs.run_segment.clear_cache()
    programs.read_sequences.clear_cache()
    programs.prefill_sequences.clear_cache()
    forbid_compiling(monkeypatch)
    assert answers(model, monkeypatch) == first


def test_program_that_failed_is_tried_again():
    outcomes = [MemoryError("no room"), "compiled"]

    class Failing:
        __name__ = "failing"

        def lower(self, *args):
            return SimpleNamespace(compile=self.compile)

        def compile(self):
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    found = Programs()
    call = ProgramCall(Failing(), None, (jnp.zeros(1),), {})
    with pytest.raises(MemoryError):
        found.start(call, None).result()
    assert found.start(call, None).result() == "compiled"
