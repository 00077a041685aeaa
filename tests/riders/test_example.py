"""The worked example of docs/extending.md."""

import importlib.util
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_example_of_a_rider_runs_and_closes_its_brackets(tmp_path, monkeypatch):
    """It is imported from a file: programs are kept, and name the rider's functions by their module."""
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if "Rider(" in block]
    path = tmp_path / "brackets_example.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    assert ")" not in module.texts["0"]
    assert module.texts["20"][0] == ")"
