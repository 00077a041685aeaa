"""The first cell of each notebook installs detspec from where it is, or says what to do."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.notebook_address import REPOSITORY, with_address

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
HERE = 'import importlib.metadata; print(importlib.metadata.version("detspec"))'


def first_cell(notebook: Path) -> str:
    return re.search(r"# %%\n(import glob\n.*?)\n# %%", notebook.read_text(), flags=re.DOTALL)[1]


DISTINCT = sorted({first_cell(notebook) for notebook in NOTEBOOKS})


@pytest.fixture
def installed(monkeypatch, tmp_path) -> list[str]:
    """Requests to pip, from an empty folder of a machine that has no detspec."""
    asked: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.extend(command[5:]))
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_checkout_comes_first_then_a_wheel_then_the_address_and_else_a_sentence(notebook, installed, tmp_path, monkeypatch):
    cell = first_cell(notebook).replace(f'ADDRESS = "git+{REPOSITORY}"', 'ADDRESS = ""')
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


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_the_address_of_the_project_file(notebook):
    text = notebook.read_text(encoding="utf-8")
    assert with_address(text, notebook.stem, REPOSITORY) == text, "`make pairs` writes it"
    published = with_address(text, notebook.stem, "https://github.com/someone/detspec")
    assert '\nADDRESS = "git+https://github.com/someone/detspec"' in published
    assert f"/github/someone/detspec/blob/main/notebooks/{notebook.stem}.ipynb)\n" in published
    assert with_address(published, notebook.stem, REPOSITORY) == text


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what the package is built from, with notebooks, and with a wheel in dist/; building leaves files there."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("detspec", "notebooks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    subprocess.run([sys.executable, "-m", "build", "--wheel", copy], check=True, capture_output=True)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DISTINCT)))
def test_in_a_bare_environment_the_first_cell_installs(number, checkout, tmp_path):
    bare = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    own = subprocess.check_output(
        [bare / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    (Path(own.strip()) / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")

    def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs code in the bare environment; pip installs no dependencies there, which would take a minute."""
        environment = {**os.environ, "PIP_NO_DEPS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run([bare / "bin" / "python", "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)

    told = python(DISTINCT[number], tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (1, 1)
    assert python(HERE, tmp_path).returncode == 1
    [wheel] = (checkout / "dist").glob("*.whl")
    shutil.copy(wheel, tmp_path)
    for cwd in (tmp_path, checkout / "notebooks"):
        done = python(DISTINCT[number], cwd)
        assert done.returncode == 0, done.stderr
        assert python(HERE, tmp_path).returncode == 0
        again = python(f"{DISTINCT[number]}\nassert 'extras' not in globals()", cwd)  # a second time it asks for nothing
        assert again.returncode == 0, again.stderr
        subprocess.run([bare / "bin" / "python", "-m", "pip", "uninstall", "--yes", "detspec"], check=True, capture_output=True)
        assert python(HERE, tmp_path).returncode == 1
