"""A model folder, and the command line in a process of its own."""

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
def command() -> list[str]:
    """The program as users start it, but of this Python."""
    return [sys.executable, "-m", "detspec"]


@pytest.fixture(scope="session")
def detspec(command: list[str]) -> Run:
    """Runs the command line in a process of its own."""

    def run(*args: object, **keywords: object) -> subprocess.CompletedProcess[str]:
        argv = [*command, *map(str, args)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=1200, check=False, **keywords)

    return run
