"""Packages that the stages need, where the image lacks them: named, or installed from a folder of wheels."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

NEEDED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
OPTIONAL = ("jinja2", "tokenizers", "safetensors", "optax", "orbax", "tqdm")  # of other commands; no stage imports them


def missing(names: tuple[str, ...] = NEEDED) -> list[str]:
    """Returns those of `names` that cannot be imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def install(wheels: Path, target: Path) -> None:
    """Installs all wheels of a folder into `target`, without an index, and lets this process's children see them.

    Raises `RuntimeError` with pip's last line.
    """
    found = sorted(map(str, wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", str(wheels)]
    done = subprocess.run([*command, "--upgrade", "--target", str(target), *found], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install the wheels of {wheels}: {done.stderr.strip().splitlines()[-1]}")
    see(target)


def see(folder: Path) -> None:
    """Puts `folder` on the import path of this process and its children."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))


def name_checkout(root: Path, target: Path) -> None:
    """Gives a checkout that is not installed the metadata that `detspec` asks for its version."""
    try:
        importlib.metadata.version("detspec")
    except importlib.metadata.PackageNotFoundError:
        version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
        folder = target / f"detspec-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: detspec\nVersion: {version}\n")
        see(target)
