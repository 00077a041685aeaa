"""README's list of promises and the folder of their tests name each other, and each promise has its control."""

import ast
from pathlib import Path

from scripts.site_pages import markdown

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "promises"
FILES = sorted(FOLDER.glob("test_*.py"))
HEADING = "## What is promised\n"


def linked(text: str) -> list[str]:
    """The files of `FOLDER` that the list of promises in `text` links, in its order."""
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    return [Path(link.path).name for link in markdown.links(section) if link.path.startswith("tests/promises/")]


def lacking(source: str) -> list[str]:
    """Names the parts of a promise that its file lacks."""
    tree = ast.parse(source)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    has = {
        "a docstring that says what the control takes away": "control" in (ast.get_docstring(tree) or ""),
        "a test": any(not name.startswith("test_control_") for name in names),
        "a control": any(name.startswith("test_control_") for name in names),
    }
    return [part for part, is_there in has.items() if not is_there]


def test_each_promise_of_the_readme_has_a_file_and_each_file_a_promise():
    found = linked((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) >= 11
    assert sorted(found) == [path.name for path in FILES]


def test_each_promise_has_a_test_and_a_control_and_says_what_the_control_takes_away():
    assert {path.name: lacking(path.read_text(encoding="utf-8")) for path in FILES} == {path.name: [] for path in FILES}


def test_files_that_are_linked_elsewhere_and_parts_that_are_missing_are_found():
    text = f"[a](tests/promises/a.py)\n{HEADING}[b](tests/promises/b.py) [b](tests/promises/b.py) [c](docs/c.md)\n## D\n"
    assert linked(text + "[e](tests/promises/e.py)") == ["b.py", "b.py"]
    assert lacking("def test_a(): pass") == ["a docstring that says what the control takes away", "a control"]
    assert lacking('"""The control: b."""\ndef test_control_b(): pass') == ["a test"]
