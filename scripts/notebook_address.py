"""Writes into notebooks where the project lives: `pyproject.toml` knows it, and on Colab a notebook is alone."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY: str = PROJECT.get("urls", {}).get("Repository", "")

GITHUB = "https://github.com/"
COLAB = "https://colab.research.google.com"
ADDRESS = re.compile(r'^ADDRESS = ".*?"', re.MULTILINE)
ON_COLAB = re.compile(rf"^# (On Colab|\[!\[Open in Colab\]\({COLAB}).*$", re.MULTILINE)
BY_HAND = "On Colab, first upload the wheel that `make dist` writes (*Files*, at the left)."


def with_address(text: str, name: str, repository: str) -> str:
    """The source `text` of the notebook `name` with the address of its first cell, and the line on Colab above it.

    A `repository` of GitHub gets a badge that opens the notebook. An empty one has no address.
    """
    badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/"
    path = repository.removeprefix(GITHUB).removesuffix(".git")
    line = f"{badge}{path}/blob/main/notebooks/{name}.ipynb)" if repository.startswith(GITHUB) else BY_HAND
    address = f"git+{repository}" if repository else ""
    return ON_COLAB.sub(f"# {line}", ADDRESS.sub(f'ADDRESS = "{address}"', text))
