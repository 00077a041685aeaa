"""The sizes of a package, and the modules that a call enters."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_house.py"
SOURCES = {
    "house/__init__.py": "",
    "house/attic.py": '"""Boxes."""\n\nclass Box:\n    def open(self):\n        return 1\n',
    "house/cellar.py": "from house.attic import Box\nclass Box:\n    def shut(self):\n        return 2\n",
    "house/hall.py": "import house.cellar\nfrom house import attic\ndef enter():\n    return attic.Box().open()\n",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_house", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def house(tmp_path, monkeypatch) -> Iterator[Path]:
    (tmp_path / "house").mkdir()
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "house"
    for name in [name for name in sys.modules if name.split(".")[0] == "house"]:
        del sys.modules[name]


def test_sizes_count_lines_names_that_stand_twice_and_importers(script, house):
    assert script.sizes(house) == {
        "lines": 13,
        "lines without docstrings and blank ones": 11,
        "files": 4,
        "classes": 2,
        "functions": 3,
        "class names that stand twice": ["Box"],
        "modules with exactly one importer": ["house.cellar"],
        "modules under 40 lines": ["house.attic", "house.cellar", "house.hall"],
    }


def test_visits_note_modules_and_changes_between_them(script, house):
    hall = importlib.import_module("house.hall")
    visits = script.Visits(house)
    script.with_profile(visits, hall.enter)
    assert (visits.modules, visits.changes) == ({"house.hall", "house.attic"}, 3)  # into the hall, up, and back
