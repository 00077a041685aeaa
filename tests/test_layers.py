"""A module imports only from layers to its left, and the layers up to `generate` touch no files, clocks or processes.

To amend: a new module joins a tuple of `TRUNK`; a package that hangs off the trunk gets a line in `BRANCHES`.
"""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "detspec"

# Left to right; modules of one tuple may import each other.
TRUNK = (
    ("errors", "config", "schedule", "presets", "environment", "targets", "roofline", "progress"),
    ("cache", "state"),
    ("ops",),
    ("model",),
    ("stopping", "sampling_params", "sampler"),
    ("draft",),
    ("generate",),
    ("engine",),
    ("jobs",),
    ("viz",),
    ("doctor", "bench", "demo", "planning", "traces"),
    ("__init__",),
    ("cli", "__main__"),
)

# name: (the rightmost things it may import, the first layer of the trunk that may import it)
BRANCHES = {
    "checkpoint": (("model",), "engine"),
    "thinking": (("model",), "draft"),
    "train": (("viz", "checkpoint", "thinking"), "demo"),
}

PURE = (
    "config",
    "schedule",
    "cache",
    "state",
    "ops",
    "model",
    "thinking",
    "stopping",
    "sampling_params",
    "sampler",
    "draft",
    "generate",
)
IMPURE_MODULES = {
    "io",
    "json",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "socket",
    "subprocess",
    "sys",
    "threading",
    "time",
    "tqdm",
}


def layer_of(name: str) -> str:
    """`detspec.ops.norm` -> `ops`; the package itself is `__init__`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def trunk_rank(layer: str) -> int:
    return next(rank for rank, names in enumerate(TRUNK) if layer in names)


def known_layers() -> set[str]:
    return {name for names in TRUNK for name in names} | set(BRANCHES)


def allowed_imports(layer: str) -> set[str]:
    """The layers that modules of `layer` may import."""
    if layer in BRANCHES:
        rightmost, _ = BRANCHES[layer]
        return {layer} | set(rightmost) | set().union(*(allowed_imports(name) for name in rightmost))
    rank = trunk_rank(layer)
    left = {name for names in TRUNK[: rank + 1] for name in names}
    return left | {name for name, (_, first) in BRANCHES.items() if trunk_rank(first) <= rank}


def imported_names(source: str) -> set[str]:
    """Dotted names of all that `source` imports, wherever in it: `import a.b` and `from a import b` both give `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def violations(layer: str, source: str) -> list[str]:
    """What `source`, a module of `layer`, imports and may not."""
    found = []
    for name in sorted(imported_names(source)):
        top = name.split(".")[0]
        target = layer_of(name)
        if target not in known_layers():
            target = "__init__"  # `from detspec import Engine`: a name, not a module
        if name.startswith("."):
            found.append(f"{layer} imports {name}: write imports in full")
        elif top == "detspec" and target not in allowed_imports(layer):
            found.append(f"{layer} imports {name}: {target} is not to its left")
        elif layer in PURE and top in IMPURE_MODULES:
            found.append(f"{layer} imports {name}: layers up to generate are pure")
    return found


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_to_its_left(path: Path):
    layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert layer in known_layers(), f"{layer} has no place in TRUNK or BRANCHES of {Path(__file__).name}"
    assert violations(layer, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("ops", "from detspec.model.layers import block"),
        ("ops", "import detspec.engine"),
        ("model", "from detspec import generate"),
        ("sampling_params", "def late():\n    from detspec.draft import anything"),
        ("draft", "from detspec import Engine"),
        ("generate", "from detspec.checkpoint import load"),
        ("checkpoint", "from detspec.sampling_params import sample"),
        ("engine", "from detspec.train import fit"),
        ("engine", "from .scheduler import Scheduler"),
        ("ops", "import time"),
        ("generate", "from os import environ"),
    ],
)
def test_module_with_a_forbidden_import_is_caught(layer: str, source: str):
    assert len(violations(layer, source)) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("model", "from detspec.ops.norm import rms_norm\nfrom detspec import errors"),
        ("config", "from detspec.errors import InputError"),
        ("engine", "import time\nfrom detspec.checkpoint.hf import read"),
        ("train", "from detspec.checkpoint import store\nfrom detspec.ops import norm"),
        ("cli", "from detspec import Engine\nimport detspec.train.loop"),
    ],
)
def test_module_with_allowed_imports_passes(layer: str, source: str):
    assert violations(layer, source) == []


def test_impure_modules_are_names_that_exist():
    assert IMPURE_MODULES - {"tqdm"} <= sys.stdlib_module_names
