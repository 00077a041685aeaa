"""Names that `import detspec` offers, and modules that it leaves out until they are used."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import detspec as ds

ROOT = Path(__file__).parents[1]
PICTURES = ("matplotlib", *(f"detspec.{name}" for name in ("traces", "viz", "train", "bench", "demo", "doctor", "planning")))
HEAVY = ("jax", "flax", "numpy", "orbax", "jinja2", "tokenizers")


def loaded(code: str, lazy: tuple[str, ...] = PICTURES) -> list[str]:
    """Which of `lazy`, or modules in them, a new process holds after `code`."""
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    names = json.loads(done.stderr.splitlines()[-1])
    return [name for name in names if name.startswith(tuple(f"{one}." for one in lazy)) or name in lazy]


def test_import_loads_no_jax():
    assert loaded("import detspec as ds; ds.InputError", HEAVY) == []


@pytest.mark.parametrize(
    "args", [["--help"], ["generate", "--help"], ["generate", "--prompts", "x", "--out", "y", "--n", "many"]]
)
def test_help_and_bad_options_load_no_jax(args: list[str]):
    assert loaded(f"from detspec.cli import main\ntry: main({args})\nexcept SystemExit: pass", HEAVY) == []


def test_engine_loads_neither_pictures_nor_experiments_nor_orbax():
    assert loaded("import detspec as ds; ds.Engine, ds.load", (*PICTURES, "orbax", "optax")) == []


def test_names_of_traces_load_what_they_need_when_they_are_used():
    recorded = loaded("import detspec as ds; ds.traces.run_trace")
    assert {"detspec.traces", "detspec.traces.record_windows"} <= set(recorded)
    assert "matplotlib" not in recorded
    assert {"matplotlib", "detspec.traces.draw_windows"} <= set(loaded("import detspec as ds; ds.traces.save_trace"))


def test_public_names_are_there():
    assert len(ds.__all__) == 24
    assert all(callable(getattr(ds, name)) for name in ds.__all__ if name != "traces")
    assert set(ds.__all__) <= set(dir(ds))


def test_every_public_name_has_a_twin_for_type_checkers_from_the_same_file():
    (block,) = (node for node in ast.parse(Path(ds.__file__).read_text()).body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed.pop("traces") == "detspec"
    assert typed == {name: f"detspec.{file}" for name, file in ds.FILES.items()}
    assert {*typed, "traces"} == set(ds.__all__)


def test_names_of_traces_are_theirs():
    assert "find_rollback" in dir(ds.traces)
    assert all(getattr(ds.traces, name).__name__ == name for name in ds.traces.__all__)


@pytest.mark.parametrize("module", [ds, ds.traces])
def test_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018
