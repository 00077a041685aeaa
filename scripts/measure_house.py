"""Measures the size of the package, and how far a request travels in it, in this checkout or in another one.

    python scripts/measure_house.py
    python scripts/measure_house.py ../detspec-before

Sizes are read from the sources. The rest is profiled in a process of that checkout, on the shipped model, once it is warm: the
modules of the package that one `Engine.generate` enters, how often a streamed step changes from one module to another, by calls
and returns, and how often a job opens its file of prompts, parses a line of it and makes tokens of it.
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = 40  # lines
NUM_LINES = 5  # of the job
Trees = dict[str, ast.Module]  # by the name of the module


def main() -> int:
    """Prints one row for each measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout (default: the one of this script)")
    parser.add_argument("--names", action="store_true", help="also name the modules and classes that are counted")
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)  # run by this script itself
    args = parser.parse_args()
    root = args.root.resolve()
    if args.profile:
        print(json.dumps(profiled(root)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), str(root), "--profile"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = sizes(root / "detspec") | json.loads(done.stdout.splitlines()[-1])
    for name, found in measured.items():
        counted = len(found) if isinstance(found, list) else found
        print(f"{name:48} {counted:>7}")
        if args.names and isinstance(found, list):
            print("    " + " ".join(found))
    return 0


def sizes(package: Path) -> dict[str, Any]:
    """Counts of the sources; lists hold names."""
    texts = {module_of(path, package): path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    readers = importers(trees)
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "lines without docstrings and blank ones": sum(num_code_lines(text, trees[name]) for name, text in texts.items()),
        "files": len(texts),
        "classes": classes.total(),
        "functions": sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes),
        "class names that stand twice": sorted(name for name, count in classes.items() if count > 1),
        "modules with exactly one importer": sorted(name for name, found in readers.items() if len(found) == 1),
        f"modules under {SMALL} lines": sorted(
            name for name, text in texts.items() if name in readers and text.count("\n") < SMALL
        ),
    }


def module_of(path: Path, package: Path) -> str:
    """The dotted name of a file; a folder's is that of its `__init__.py`."""
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


def num_code_lines(text: str, tree: ast.Module) -> int:
    """Lines of `text` that are neither blank nor part of a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    inside = {number for each in docstrings for number in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    return sum(bool(line.strip()) and number not in inside for number, line in enumerate(text.splitlines(), 1))


def importers(trees: Trees) -> dict[str, set[str]]:
    """For each module that is no folder's, the modules that import it, anywhere in their text."""
    folders = {name.rpartition(".")[0] for name in trees}
    found: dict[str, set[str]] = {name: set() for name in trees if name not in folders}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in imported:
                if module in found and module != name:
                    found[module].add(name)
    return found


def profiled(root: Path) -> dict[str, Any]:
    """Profiles a call, a stream and a job in this process, whose package must be that of `root`."""
    import detspec as ds

    assert Path(ds.__file__).is_relative_to(root), f"{ds.__file__} was imported, not the package of {root}"
    engine = ds.Engine(ds.load(), ds.EngineConfig(max_requests=4, max_len=128, method="none"))
    sampling = ds.SamplingParams(max_tokens=16, ignore_eos=True)

    def generate() -> None:
        engine.generate(["def fib(n):", "class A:"], sampling)

    def stream() -> list[int]:
        """Changes of module of each step that commits a token."""
        visits = Visits(root / "detspec")
        marks = []
        with_profile(visits, lambda: marks.extend(visits.changes for _ in engine.stream("def fib(n):", sampling)))
        return [after - before for before, after in itertools.pairwise(marks)]

    generate()
    stream()
    visits = Visits(root / "detspec")
    with_profile(visits, generate)
    return {
        "host modules of one Engine.generate": sorted(visits.modules),
        "changes of module in a streamed step, median": int(median(stream())),
        **job(),
    }


class Visits:
    """A profile function: which modules of a package are entered, and how often the module changes."""

    def __init__(self, package: Path) -> None:
        self.modules: set[str] = set()
        self.changes = 0
        self._package = package
        self._names: dict[str, str | None] = {}  # of files; None is another package's
        self._last: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Notes the module that runs after this event."""
        if event not in ("call", "return"):
            return
        back = frame.f_back
        name = self._name(frame if event == "call" or back is None else back)
        if name is not None and name != self._last:
            self.changes += 1
            self.modules.add(name)
            self._last = name

    def _name(self, frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        if file not in self._names:
            inside = Path(file).is_relative_to(self._package)
            self._names[file] = module_of(Path(file), self._package) if inside else None
        return self._names[file]


def with_profile(profile: Callable[[FrameType, str, Any], None], act: Callable[[], object]) -> None:
    """Calls `act` under a profile function, which further threads get, too."""
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def job() -> dict[str, float]:
    """How often a job opens its file, and parses and tokenizes a line of it, on average."""
    from detspec.cli import main as detspec

    lines = [json.dumps({"id": f"line-{number}", "prompt": f"def f{number}("}) for number in range(NUM_LINES)]
    Path("in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    counts: Counter[str] = Counter()

    def opened(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith("in.jsonl"):
            counts["opened"] += 1

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "raw_decode":
            counts["parsed"] += str(frame.f_locals.get("s")).strip() in lines
        elif event == "c_call" and type(getattr(arg, "__self__", None)).__module__.startswith("tokenizers"):
            counts["tokenized"] += arg.__name__ == "encode"

    sys.addaudithook(opened)
    options = ["--max-tokens", "4", "--max-len", "128", "--max-requests", "4", "--method", "none"]
    with_profile(profile, lambda: detspec(["generate", "--prompts", "in.jsonl", "--out", "out.jsonl", *options]))
    return {
        "times that a job opens its prompts": counts["opened"],
        "times that a job parses a line": counts["parsed"] / NUM_LINES,
        "times that a job tokenizes a line": counts["tokenized"] / NUM_LINES,
    }


if __name__ == "__main__":
    sys.exit(main())
