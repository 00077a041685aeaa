"""What `import detspec` offers, and what it leaves out until it is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import detspec as ds

ROOT = Path(__file__).parents[1]
LAZY = ("matplotlib", *(f"detspec.{name}" for name in ("traces", "viz", "train", "bench", "demo", "doctor", "planning")))


def loaded(code: str) -> list[str]:
    """Which of `LAZY`, or modules in them, a new process holds after `code`."""
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return [name for name in json.loads(done.stdout) if name.startswith(tuple(f"{lazy}." for lazy in LAZY)) or name in LAZY]


def test_import_loads_neither_pictures_nor_experiments():
    assert loaded("import detspec") == []


def test_names_of_traces_load_what_they_need_when_they_are_used():
    recorded = loaded("import detspec as ds; ds.traces.run_trace")
    assert {"detspec.traces", "detspec.traces.record_windows"} <= set(recorded)
    assert "matplotlib" not in recorded
    assert {"matplotlib", "detspec.traces.draw_windows"} <= set(loaded("import detspec as ds; ds.traces.save_trace"))


def test_public_names_are_there():
    assert len(ds.__all__) == 18
    assert all(callable(getattr(ds, name)) for name in ds.__all__)
    assert {*ds.__all__, "traces"} <= set(dir(ds))
    assert "find_rollback" in dir(ds.traces)
    assert all(getattr(ds.traces, name).__name__ == name for name in ds.traces.__all__)


@pytest.mark.parametrize("module", [ds, ds.traces])
def test_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018
