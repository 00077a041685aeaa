"""Habits of CONTRIBUTING that ruff has no rule for: no literal splat, paired assignments only where they must be."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "detspec"


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


def test_package_has_no_literal_splat_and_pairs_only_what_it_swaps_or_unpacks():
    found = {str(path): odd for path in sorted(PACKAGE.rglob("*.py")) if (odd := oddities(path.read_text(encoding="utf-8")))}
    assert found == {}


def test_oddities_are_seen_and_what_is_allowed_is_not():
    assert oddities("f(*(a, b), c=1)") == ["1: literal splat"]
    assert oddities("a, b = 1, 2") == ["1: paired assignment"]
    assert oddities("a, b = b, a\nc, d = f()\nf(*args)\nx = 1, 2") == []
