"""A module imports only from layers to its left, files import no circles, and the layers up to `generation` are pure.

To amend: a new module joins a tuple of `TRUNK`; a package that hangs off the trunk gets a line in `BRANCHES`.

What counts as an import: every `import` statement, also inside a function or under TYPE_CHECKING, because a reader follows all
of them. `from a import b` imports the file of `a.b` where there is one, else that of `a`. The `__init__` files of packages
above an imported module do not count. Names that are looked up lazily count by their twins under TYPE_CHECKING.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Left to right; modules of one tuple may import each other.
TRUNK = (
    (
        "errors",
        "extras",
        "choices",
        "config",
        "schedule",
        "environment",
        "targets",
        "target_compilers",
        "roofline",
        "progress",
        "seeds",
        "distributed",
        "compile_cache",
        "native",
        "held",
        "struct",
        "read_json",
        "plain",
        "say",
        "garbage",
        "integer",
    ),
    ("cache", "state", "riders", "passes"),
    ("ops",),
    ("model",),
    ("presets",),
    ("mesh",),
    ("sampling_params", "filters", "sampler"),
    ("draft",),
    ("generation",),
    ("engine",),
    ("openai",),
    ("jobs",),
    ("serve", "adapters"),
    ("viz",),
    ("doctor", "bench", "demo", "planning", "traces"),
    ("__init__",),
    ("cli", "__main__"),
)

# name: (the rightmost layers it may import, the first layer of the trunk that may import it)
BRANCHES = {
    "checkpoint": (("mesh",), "engine"),
    "thinking": (("model",), "draft"),
    "train": (("viz", "checkpoint", "thinking"), "demo"),
    "rl": (("engine", "train"), "demo"),
}

PURE = {
    "choices",
    "config",
    "schedule",
    "cache",
    "state",
    "riders",
    "ops",
    "model",
    "thinking",
    "sampling_params",
    "filters",
    "sampler",
}
PURE |= {"draft", "generation", "seeds", "plain", "riders", "passes"}
IMPURE_MODULES = {"io", "json", "logging", "multiprocessing", "os", "pathlib", "random", "socket", "subprocess", "sys"}
IMPURE_MODULES |= {"threading", "time", "tqdm"}
OUTSIDE = {"configs", "notebooks", "scripts", "tests"}


def test_modules_import_only_to_their_left():
    assert [found for name, source in modules("detspec").items() for found in violations(name, source)] == []


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("ops.norm", "from detspec.model.layers import block", "model is not to its left"),
        ("ops.norm", "import detspec.engine", "engine is not to its left"),
        ("model.layers", "from detspec.generation import loop", "generation is not to its left"),
        ("sampling_params", "def late():\n    from detspec.draft import anything", "draft is not to its left"),
        ("draft.given", "from detspec import Engine", "__init__ is not to its left"),
        ("generation.loop", "from detspec.checkpoint import load", "checkpoint is not to its left"),
        ("checkpoint.hf", "from detspec.sampling_params import sample", "sampling_params is not to its left"),
        ("engine.engine", "if TYPE_CHECKING:\n    from detspec.train import fit", "train is not to its left"),
        ("engine.engine", "from .scheduler import Scheduler", "write imports in full"),
        ("ops.norm", "import time", "layers up to generation are pure"),
        ("generation.loop", "from os import environ", "layers up to generation are pure"),
        ("cli.demo", "from scripts.replications.thinking_states import runs", "the package stands alone"),
        ("parts.demo", "import detspec", "no place in TRUNK or BRANCHES"),
    ],
)
def test_forbidden_import_is_caught(name: str, source: str, found: str):
    (violation,) = violations(f"detspec.{name}", source)
    assert found in violation


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model.layers", "from detspec.ops.norm import rms_norm\nfrom detspec import errors"),
        ("config", "from detspec.errors import InputError"),
        ("engine.engine", "import time\nfrom detspec.checkpoint.hf import read"),
        ("train.run", "from detspec.checkpoint import store\nfrom detspec.ops import norm"),
        ("cli.demo", "from detspec import Engine\nimport detspec.train.loop"),
    ],
)
def test_allowed_import_passes(name: str, source: str):
    assert violations(f"detspec.{name}", source) == []


def test_files_import_no_circles():
    assert circle(imported_files({**modules("detspec"), **modules("scripts/replications")})) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a.x": "import a.y", "a.y": "from a.x import f"}, ["a.x", "a.y", "a.x"]),
        (
            {"a.x": "from a import y", "a.y": "def f():\n    import a.z", "a.z": "from a.x import f"},
            ["a.x", "a.y", "a.z", "a.x"],
        ),
        ({"a.x": "if TYPE_CHECKING:\n    from a.y import F", "a.y": "import a.x"}, ["a.x", "a.y", "a.x"]),
        ({"a": "from a.x import f", "a.x": "from a import g"}, ["a", "a.x", "a"]),
        ({"a": "from a.x import f", "a.x": "import a.y", "a.y": "import a.z", "a.z": "import os"}, []),
    ],
)
def test_circle_is_caught_and_named(sources: dict[str, str], expected: list[str]):
    assert circle(imported_files(sources)) == expected


def violations(name: str, source: str) -> list[str]:
    """The imports in `source`, the module called `name`, that are not allowed there."""
    layer = layer_of(name)
    if layer not in known_layers():
        return [f"{name}: {layer} has no place in TRUNK or BRANCHES of {Path(__file__).name}"]
    found = []
    for imported in sorted(imported_names(source)):
        top = imported.split(".")[0]
        target = layer_of(imported)
        if target not in known_layers():
            target = "__init__"  # `from detspec import Engine`: a name, not a module
        if imported.startswith("."):
            found.append(f"{name} imports {imported}: write imports in full")
        elif top in OUTSIDE:
            found.append(f"{name} imports {imported}: the package stands alone")
        elif top == "detspec" and target not in allowed_imports(layer):
            found.append(f"{name} imports {imported}: {target} is not to its left")
        elif layer in PURE and top in IMPURE_MODULES:
            found.append(f"{name} imports {imported}: layers up to generation are pure")
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle in `graph`, the first one again at the end; [] if there is none."""
    finished: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for name in sorted(graph[path[-1]] - finished):
            if name in path:
                return [*path[path.index(name) :], name]
            if found := search([*path, name]):
                return found
        finished.add(path[-1])
        return []

    return next((found for name in sorted(graph) if (found := search([name]))), [])


def imported_files(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module, which of the other modules of `sources` it imports."""
    graph = {}
    for name, source in sources.items():
        names = imported_names(source)
        files = {imported if imported in sources else imported.rpartition(".")[0] for imported in names}
        graph[name] = (files & sources.keys()) - {name}
    return graph


def modules(package: str) -> dict[str, str]:
    """The sources of all files in a folder of the repository, by module name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def imported_names(source: str) -> set[str]:
    """Dotted names of all imports in `source`: `import a.b` and `from a import b` both give `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def layer_of(name: str) -> str:
    """`detspec.ops.norm` -> `ops`; the package itself is `__init__`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def allowed_imports(layer: str) -> set[str]:
    """The layers that modules of `layer` may import."""
    if layer in BRANCHES:
        rightmost, _ = BRANCHES[layer]
        return {layer} | set(rightmost) | set().union(*(allowed_imports(name) for name in rightmost))
    rank = trunk_rank(layer)
    left = {name for names in TRUNK[: rank + 1] for name in names}
    return left | {name for name, (_, first) in BRANCHES.items() if trunk_rank(first) <= rank}


def trunk_rank(layer: str) -> int:
    return next(rank for rank, names in enumerate(TRUNK) if layer in names)


def known_layers() -> set[str]:
    return {name for names in TRUNK for name in names} | set(BRANCHES)
