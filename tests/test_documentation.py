"""The documentation: links lead somewhere, code in it is code, every public name has its place, and what builds the site."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import detspec
from detspec.checkpoint.families import FAMILIES
from detspec.cli.commands import parse
from scripts import models_page
from scripts.site_pages import check, markdown, reference
from scripts.site_pages.field_comments import comment_of, comments

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "docs" / "README.md"
FOLDERS = ("docs", "scripts")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def broken_links(page: Path) -> list[str]:
    """Line and target of each link of `page` that leads to no file, or to no heading of a page."""
    found = []
    for link in markdown.links(page.read_text(encoding="utf-8")):
        target = page.parent / link.path if link.path else page
        is_lost = not target.exists()
        if not is_lost and link.anchor and target.suffix == ".md":
            is_lost = link.anchor not in markdown.anchors(target.read_text(encoding="utf-8"))
        if is_lost and not link.is_outside:
            found.append(f"{link.line}: {link.target}")
    return found


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_page_of_models_is_that_of_the_families():
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(), "run scripts/models_page.py"
    cases = models_page.cases_by_class()
    assert all(family.models and models_page.cases_of(family, cases) for family in FAMILIES)


def test_links_of_every_page_lead_somewhere():
    assert len(PAGES) > 20
    assert {str(page): lost for page in PAGES if (lost := broken_links(page))} == {}


def test_link_to_a_missing_file_or_heading_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# Ünder `the` sea, at 100 %\n")
    page = tmp_path / "page.md"
    lines = (
        "[a](other.md#ünder-the-sea-at-100-)",
        "[b](other.md#sea)",
        "[c](no.md)",
        "`[d](no.md)`",
        "[e](https://no.md)",
        "[f](#)",
    )
    page.write_text("\n".join(lines) + "\n```\n[g](no.md)\n```\n![h](no.png)\n")
    assert broken_links(page) == ["2: other.md#sea", "3: no.md", "10: no.png"]


def test_every_page_of_docs_is_listed_once():
    listed = [link.path for link in markdown.links(LISTED.read_text())]
    assert len(listed) == len(set(listed))
    assert {page.name for page in LISTED.parent.glob("*.md")} - {LISTED.name} == {path for path in listed if "/" not in path}


def test_python_of_every_page_is_python():
    blocks = [block for page in PAGES for block in code_blocks(page, "python")]
    assert len(blocks) > 15
    for block in blocks:
        ast.parse(block)


def test_commands_of_every_page_are_commands_of_ours():
    lines = [line for page in PAGES for block in code_blocks(page, "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if re.match(r"\$ detspec [a-z]", line) and "..." not in line]
    assert len(commands) > 15
    for command in commands:
        parse(shlex.split(command, comments=True)[1:])


def test_links_are_rewritten_and_code_is_not():
    text = "[a](b.md#c) `[a](b.md)` ![d](e.png)\n\n    ~~~\n```\n[a](b.md)\n```\n[f](g.md)"
    shown = markdown.rewritten(text, lambda link: f"{link.line}-{link.target}")
    assert shown == "[a](1-b.md#c) `[a](b.md)` ![d](1-e.png)\n\n    ~~~\n```\n[a](b.md)\n```\n[f](7-g.md)"


def test_image_of_another_host_becomes_its_words():
    text = "[![Open in Colab](https://a.b/badge.svg)](https://c.d) ![x](y.png) `![z](https://a.b)`"
    assert markdown.without_outside_images(text) == "[Open in Colab](https://c.d) ![x](y.png) `![z](https://a.b)`"


def test_tests_that_pages_name_are_there():
    """`docs/serving.md` says which tests hold its promise; those of the README are in `tests/promises`."""
    defined = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named <= defined
    assert len(named) >= 2


def test_list_after_a_paragraph_gets_a_blank_line():
    text = "so:\n* a\n  b\n* c\n\n* d\n```\nx\n* y\n```\n28. is no list"
    assert markdown.with_blank_before_lists(text) == "so:\n\n* a\n  b\n* c\n\n* d\n```\nx\n* y\n```\n28. is no list"


def test_headings_have_the_names_that_github_gives_them():
    assert markdown.anchors("# `a_b`: C & D\n## x\n## x\n```\n# no\n```") == {"a_b-c--d", "x", "x-1"}


def test_every_public_name_is_on_a_page(monkeypatch):
    pages = "".join(reference.python_pages().values())
    assert all(f"::: detspec.{name}\n" in pages for name in detspec.__all__ if name != "traces")
    assert "::: detspec.traces.find_rollback\n" in pages
    monkeypatch.setattr(detspec, "__all__", [*detspec.__all__, "forgotten"])
    with pytest.raises(ValueError, match="no page has the public names forgotten"):
        reference.python_pages()


def test_every_command_is_on_a_page():
    page = reference.commands_page()
    helped = subprocess.run([sys.executable, "-m", "detspec", "--help"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^    ([a-z]+) ", helped, re.MULTILINE)
    assert len(names) == 14
    assert re.findall(r"^## detspec ([a-z]+)$", page, re.MULTILINE) == names
    assert "--max-requests" in page


def undescribed(source: Path, name: str) -> list[str]:
    """Fields of the class `name` in `source` that neither its docstring nor a comment describes."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (node,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    described = ast.get_docstring(node) or ""
    found = comments(source)
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]
    return [
        field.target.id
        for field in fields
        if not comment_of(found, field.lineno, field.end_lineno) and f"\n    {field.target.id}: " not in described
    ]


def test_fields_of_every_public_class_are_described():
    names = [name for group in reference.GROUPS.values() for name in group.names]
    classes = [name for name in names if name.rpartition(".")[2][0].isupper()]
    assert len(classes) > 15
    missing = {name: undescribed(ROOT / reference.file_of(name), name.rpartition(".")[2]) for name in classes}
    assert {name: fields for name, fields in missing.items() if fields} == {}


def test_field_without_a_description_is_found(tmp_path):
    source = tmp_path / "a.py"
    fields = ("a: int  # one", "# two", "b: int", "c: int", "d: int")
    source.write_text('class A:\n    """x\n\n    Attributes:\n        d: four.\n    """\n\n    ' + "\n    ".join(fields))
    assert undescribed(source, "A") == ["c"]


def test_broken_site_is_found_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="sub/page.html#b">y</a><img src="a.png"><a href="#top">z</a>'
    )
    (tmp_path / "sub" / "page.html").write_text(
        '<p id="b"><a href="../index.html">x</a><code>[a][b.c]</code><a href="https://x.y">z</a>'
    )
    (tmp_path / "a.png").write_bytes(b"")
    assert list(check.errors(tmp_path)) == []
    wrong = (
        '<a href="no.html">x</a><a href="sub/page.html#no">y</a><img src="no.png"><script src="https://cdn.x/y.js"></script>'
    )
    (tmp_path / "wrong.html").write_text(wrong + '<link rel="stylesheet" href="//fonts.x/y.css"><p>see [it][detspec.Nope]</p>')
    (tmp_path / "wrong.css").write_text("@font-face { src: url(https://fonts.x/y.woff) }")
    found = list(check.errors(tmp_path))
    assert [error.partition(": ")[0] for error in found] == ["wrong.html"] * 6 + ["wrong.css"]
    for part in (
        "no.html, which does not",
        "#no, and there",
        "no.png, which does not",
        "cdn.x",
        "fonts.x/y.css",
        "[detspec.Nope]",
    ):
        assert sum(part in error for error in found) == 1


def test_site_without_pages_is_found_out(tmp_path):
    assert list(check.errors(tmp_path)) == [f"{tmp_path} has no pages"]
