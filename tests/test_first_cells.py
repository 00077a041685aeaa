"""The first cell of each notebook installs detspec from where it is, or says what to do."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def first_cell(notebook: Path) -> str:
    return re.search(r"# %%\n(import glob\n.*?)\n# %%", notebook.read_text(), flags=re.DOTALL)[1]


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path) -> list[str]:
    """Requests to pip, from an empty folder of a machine that has no detspec."""
    asked: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.extend(command[5:]))
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_checkout_comes_first_then_a_wheel_then_the_address_and_else_a_sentence(notebook, installed, tmp_path, monkeypatch):
    cell = first_cell(notebook)
    with pytest.raises(SystemExit, match="put the wheel that `make dist` writes next to this notebook"):
        exec(cell, {})
    assert installed == []
    exec(cell.replace('ADDRESS = ""', 'ADDRESS = "git+https://example.org/detspec"'), {})
    wheel = tmp_path / "detspec-0.1.0-py3-none-any.whl"
    wheel.touch()
    exec(cell, {})
    monkeypatch.chdir(ROOT / "notebooks")
    exec(cell, {})
    asked = [each for each in installed if each != "openai"]
    assert [each.partition("[")[0] for each in asked] == ["detspec", str(wheel), str(ROOT)]
    assert all("[plots" in each for each in asked)
    assert asked[0].endswith("] @ git+https://example.org/detspec")


def test_notebooks_have_the_address_of_the_project_file():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    address = f"git+{urls['Repository']}" if "Repository" in urls else ""
    assert {re.search(r'^ADDRESS = "(.*?)"', first_cell(path), flags=re.MULTILINE)[1] for path in NOTEBOOKS} == {address}
