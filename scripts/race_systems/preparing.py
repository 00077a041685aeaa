"""Makes environments and forms of the model; what is there already is kept."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from race_systems.systems import ENVIRONMENTS, Form

SCRIPTS = Path(__file__).parents[1]
INSTALLED = ".installed"  # an environment without this file was not finished


class FailedError(RuntimeError):
    """A system cannot take part; the message is one line."""


def python_of(name: str, given: Mapping[str, Path], folder: Path) -> Path:
    """The interpreter of the environment `name`: a given one, the running one, or one that is installed into `folder`."""
    environment = ENVIRONMENTS[name]
    if name in given:
        return given[name]
    if not environment.commands:
        return Path(sys.executable)
    place = folder / f"env-{name}"
    python = place / "bin" / "python"
    if not (place / INSTALLED).exists():
        log = folder / f"env-{name}.log"
        log.unlink(missing_ok=True)
        run([sys.executable, "-m", "venv", "--clear", str(place)], log)
        for command in environment.commands:
            run([str(python), "-m", "pip", *command], log, environment.variables)
        (place / INSTALLED).touch()
    return python


def write_form(form: Form, folder: Path, python: Path) -> None:
    """Writes `form` of the model in `folder`, with the interpreter of its environment."""
    if not (folder / form.target).exists():
        run([str(python), "-m", f"race_systems.{form.module}", str(folder)], folder / f"{form.module}.log", import_path())


def run(command: list[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Runs `command`, output to the end of `log`; raises `FailedError` with the last line of it."""
    with log.open("a") as out:
        status = subprocess.run(command, stdout=out, stderr=out, env={**os.environ, **(variables or {})}, check=False)
    if status.returncode != 0:
        raise FailedError(last_line(log))


def import_path() -> dict[str, str]:
    """Lets a process import this package."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))}


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'no output'} ({log})"
