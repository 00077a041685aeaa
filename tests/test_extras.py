"""The commands that messages give for packages that are not installed."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from detspec.extras import install_command

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", ["aot", "data", "eval", "plots", "serve", "tunix"])
def test_command_names_the_packages_of_an_extra_and_no_package_of_ours(extra):
    command = install_command(extra)
    for needed in PROJECT["optional-dependencies"][extra]:
        assert needed.partition(";")[0].partition(">")[0].partition("[")[0] in command
    assert "detspec" not in command


def test_sources_that_are_not_installed_name_their_own_folder(monkeypatch):
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_command("data") == "pip install '.[data]'"
