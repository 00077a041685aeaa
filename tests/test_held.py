"""Which programs are compiled with options that hold XLA's products still, and that the options reach the compiler."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from detspec.compile_cache import CompileCache
from detspec.doctor.doctor import DoctorReport
from detspec.doctor.examination import Check, run_pass
from detspec.draft.given import NONE
from detspec.engine.compiled import ProgramCall, Programs
from detspec.engine.programs import Decoding, prefill_sequences, read_sequences, run_segment
from detspec.errors import InputError
from detspec.generation.loop import generate_state
from detspec.held import HELD, Jitted, compiler_options
from detspec.schedule import Numerics, Schedule

SCHEDULE = Schedule(Numerics(page=16))
X = jnp.ones((2, 2))


@pytest.mark.parametrize(
    ("platform", "numerics", "holds"),
    [
        ("gpu", {"implementation": "pallas_gpu", "linear": "pinned"}, False),
        ("gpu", {"implementation": "pallas_gpu", "linear": "xla"}, True),
        ("gpu", {"implementation": "reference", "linear": "xla"}, True),
        ("gpu", {"implementation": "reference", "linear": "pinned"}, True),
        ("gpu", {"implementation": "reference", "linear": "xla", "reductions": "native"}, False),
        ("tpu", {"implementation": "pallas_tpu", "linear": "xla"}, False),
        ("tpu", {"implementation": "reference", "linear": "xla"}, False),
        ("cpu", {"implementation": "reference", "linear": "xla"}, False),
    ],
)
def test_options_hold_what_is_xlas_on_gpus_alone(platform, numerics, holds):
    assert compiler_options(Numerics(**numerics), platform) == (HELD if holds else {})


@pytest.mark.parametrize("name", HELD)
def test_option_is_known_to_the_compiler_of_this_jax(name):
    """XLA:CPU uses none of them, but it has the same list, and refuses what is not on it."""
    assert jax.jit(lambda x: x + 1, compiler_options={name: HELD[name]})(1.0) == 2.0


def square(x, *, schedule):
    return x @ x


@pytest.fixture
def as_gpu(monkeypatch):
    """This process takes its device for a GPU."""
    monkeypatch.setattr("detspec.held._platform_of", lambda args: "gpu")


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize(
    "run",
    [
        lambda jitted: jitted(X, schedule=SCHEDULE),
        lambda jitted: jitted.lower(X, schedule=SCHEDULE).compile(),
        lambda jitted: Programs().start(ProgramCall(jitted, None, (X,), {"schedule": SCHEDULE}), None).result(),
    ],
    ids=["called", "compiled ahead of time", "started by an engine"],
)
def test_options_reach_the_compiler(monkeypatch, run):
    """It refuses an option that it does not know."""
    monkeypatch.setattr("detspec.held.HELD", {"xla_no_such_option": 1})
    jitted = Jitted(square, static_argnames="schedule")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        run(jitted)


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.make_jaxpr])
def test_program_that_needs_options_is_refused_inside_another(transform):
    jitted = Jitted(square, static_argnames="schedule")
    message = (
        r"needs compiler options, which jax does not take inside another jax\.jit: call it outside, or .* linear=\"pinned\""
    )
    with pytest.raises(InputError, match=message):
        transform(lambda x: jitted(x, schedule=SCHEDULE))(jnp.ones((2, 2, 2)))


def test_program_without_options_runs_inside_another():
    jitted = Jitted(square, static_argnames="schedule")
    assert jax.jit(lambda x: jitted(x, schedule=SCHEDULE))(X).tolist() == [[2.0, 2.0]] * 2


def test_options_of_gpus_stay_away_from_other_compilers(monkeypatch):
    monkeypatch.setattr("detspec.held.HELD", {"xla_no_such_option": 1})
    jitted = Jitted(square, static_argnames="schedule")
    assert jitted(X, schedule=SCHEDULE).tolist() == [[2.0, 2.0]] * 2


def test_program_with_options_is_another_file(monkeypatch, tmp_path: Path):
    """Options stand in the name of a program, whose text is the same."""
    jitted = Jitted(square, static_argnames="schedule")
    numbers = []
    for platform in ("cpu", "gpu", "gpu"):
        monkeypatch.setattr("detspec.held._platform_of", lambda args, platform=platform: platform)
        tmp_path.chmod(0o700)
        Programs().start(ProgramCall(jitted, None, (X,), {"schedule": SCHEDULE}), CompileCache(tmp_path)).result()
        numbers.append(len(list(tmp_path.iterdir())))
    assert numbers == [1, 2, 2]


@pytest.mark.usefixtures("as_gpu")
def test_canonical_programs_are_held_and_ordinary_ones_are_not():
    canonical = Decoding(SCHEDULE, NONE, 0, None, processing=False)
    assert run_segment.options((), {"decoding": canonical}) == HELD
    assert run_segment.options((), {"decoding": canonical._replace(source=None)}) == {}
    for jitted in (prefill_sequences, read_sequences, generate_state, run_pass):
        assert jitted.options((), {"schedule": SCHEDULE}) == HELD
    pinned = SCHEDULE.with_numerics(implementation="pallas_gpu", linear="pinned")
    assert read_sequences.options((), {"schedule": pinned}) == {}


def test_doctor_of_a_gpu_without_kernels_names_the_options():
    on_cpu = DoctorReport({"backend": "cpu"}, SCHEDULE, 1, (), Check("inverse control", "", 1, "batch 1"), ())
    on_gpu = dataclasses.replace(on_cpu, fingerprint={"backend": "gpu"})
    assert "options" not in on_cpu.table()
    (line,) = [line for line in on_gpu.table().splitlines() if line.startswith("options")]
    assert line.startswith("options      xla_gpu_autotune_level=0 xla_gpu_experimental_force_split_k=1 ")


@pytest.fixture
def jax_folder(tmp_path: Path):
    """Folder in which jax keeps what it compiles in this test."""
    of_all_tests = jax.config.jax_compilation_cache_dir
    keep_in(str(tmp_path))
    yield tmp_path
    keep_in(of_all_tests)


def keep_in(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def test_jax_keeps_programs_with_options_apart(jax_folder: Path):
    """Programs of one text in its own cache; for the third, nothing new is compiled."""

    def cube(x, *, schedule):
        return x @ x @ x

    numbers = []
    for variant in ("plain", "held", "held"):
        getattr(Jitted(cube, static_argnames="schedule"), variant)(X, schedule=SCHEDULE)
        numbers.append(len(list(jax_folder.glob("jit_cube*-cache"))))
    assert numbers == [1, 2, 2]
