"""Habits of CONTRIBUTING that ruff has no rule for: calls, paired assignments, how docstrings open, names of classes."""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A docstring that opens so leans on the name above it, or hides the thing behind a pronoun.
VAGUE_OPENING = re.compile(r"(What|One|Where|The same|Nothing|Its|Of|Those|These)\b")


def sources(*folders: str) -> dict[str, str]:
    """Texts of all Python files below `folders` of the repository, by path."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def oddities(source: str) -> list[str]:
    """Line and kind of each literal splat, and of each paired assignment that neither swaps nor unpacks one value."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and any(
            isinstance(a, ast.Starred) and isinstance(a.value, ast.Tuple | ast.List) for a in node.args
        ):
            found.append(f"{node.lineno}: literal splat")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets = {ast.unparse(element) for element in node.targets[0].elts}
            if targets != {ast.unparse(element) for element in node.value.elts}:
                found.append(f"{node.lineno}: paired assignment")
    return found


def vague_docstrings(source: str) -> list[str]:
    """Line and first words of each docstring that opens with a vague word."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [(node, ast.get_docstring(node) or "") for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [f"{node.body[0].lineno}: {text[:30]}" for node, text in texts if VAGUE_OPENING.match(text)]


def repeated_classes(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Files by name, for each name of a class that names another class or a module's alias, too."""
    classes: dict[str, list[str]] = defaultdict(list)
    aliases: dict[str, list[str]] = defaultdict(list)
    for name, source in texts.items():
        module = ast.parse(source)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                aliases[node.targets[0].id].append(name)
    found = {name: places + aliases[name] for name, places in classes.items()}
    return {name: places for name, places in found.items() if len(places) > 1}


def test_package_has_no_literal_splat_and_pairs_only_what_it_swaps_or_unpacks():
    assert {name: odd for name, source in sources("detspec").items() if (odd := oddities(source))} == {}


def test_docstrings_open_with_a_verb_or_the_name_of_the_thing():
    texts = sources("detspec", "scripts", "tests")
    assert {name: vague for name, source in texts.items() if (vague := vague_docstrings(source))} == {}


def test_no_class_name_stands_twice_in_the_package():
    assert repeated_classes(sources("detspec")) == {}


def test_oddities_are_seen_and_what_is_allowed_is_not():
    assert oddities("f(*(a, b), c=1)") == ["1: literal splat"]
    assert oddities("a, b = 1, 2") == ["1: paired assignment"]
    assert oddities("a, b = b, a\nc, d = f()\nf(*args)\nx = 1, 2") == []


def test_vague_docstrings_are_seen_and_plain_ones_are_not():
    source = '''"""What it holds."""
class A:
    """Of a file."""
    def f(self):
        r"""The same
        again."""
    async def g(self):
        """Onesided: of what it was."""
    def h(self):
        "Returns its places, where those of `A` are."
        "What is no docstring."
'''
    assert vague_docstrings(source) == ["1: What it holds.", "3: Of a file.", "5: The same\nagain."]


def test_repeated_classes_are_seen_and_repeated_aliases_alone_are_not():
    texts = {
        "a": "class A:\n    class B: ...\nT = 1",
        "b": "def f():\n    class B: ...\n    A = 1\nT = 2",
        "c": "C = int",
        "d": "class C: ...",
    }
    assert repeated_classes(texts) == {"B": ["a", "b"], "C": ["d", "c"]}
