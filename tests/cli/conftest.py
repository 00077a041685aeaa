"""A model folder and an environment for subprocesses: compiled programs kept in a temporary folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.byte_model import write_folder

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("cli") / "bytes")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The program as users start it, but of this Python."""
    return [sys.executable, "-m", "detspec.cli"]


@pytest.fixture(scope="session")
def detspec(command: list[str], environment: dict[str, str]) -> Run:
    """Runs the command line in a process of its own."""

    def run(*args: object, **keywords: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *map(str, args)], env=environment, capture_output=True, text=True, timeout=300, check=False, **keywords
        )

    return run
