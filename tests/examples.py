"""The worked examples of docs/extending.md, as modules."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def example(heading: str, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The Python below a heading of the page, as a module: programs that are kept name functions by their module."""
    _, _, below = PAGE.read_text().partition(f"### {heading}\n")
    source = re.search(r"```python\n(.*?)```", below, flags=re.DOTALL)
    assert source is not None
    path = tmp_path_factory.mktemp("examples") / (re.sub(r"\W+", "_", heading).lower() + ".py")
    path.write_text(source.group(1))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
