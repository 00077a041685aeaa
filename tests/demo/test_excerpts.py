"""Two texts side by side, with the first place marked at which they differ."""

import os
import shutil
import sys

import pytest

from detspec.demo.excerpts import LINES_BEFORE, SHOWN_LINES, side_by_side


@pytest.fixture(autouse=True)
def columns(monkeypatch) -> int:
    """A terminal of 60 columns."""
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback: os.terminal_size((60, 24)))
    return 60


def rows(first: tuple[str, str, str], other: tuple[str, str, str]) -> list[list[str]]:
    shown = side_by_side({"alone": first, "among 32": other})
    return [[column.strip() for column in line.split("│")] for line in shown.splitlines()]


def test_texts_stand_beside_each_other_and_the_first_difference_is_marked():
    found = rows(("def f(x):\n    ", "return", " x\nend"), ("def f(x):\n    ", "pass", "\n"))
    assert found == [["alone", "among 32"], ["", ""], ["def f(x):", "def f(x):"], ["«return» x", "«pass»"], ["end", ""]]


def test_blank_tokens_are_shown():
    found = rows(("a", "\n", "b"), ("a", "  ", "b"))
    assert found[2:] == [["a«⏎»", "a«··»b"], ["b", ""]]
    assert rows(("a", "", ""), ("a", "x", ""))[2] == ["a«∅»", "a«x»"]


def test_mark_is_seen_after_a_long_line_that_the_token_ends_and_where_the_token_is_long():
    found = rows(("x" * 90, "\n  «a", " b"), ("x" * 90, "y" * 90, "z"))
    assert found[3][0] == "«  «a» b"
    assert found[2][1].startswith("«yyy")


def test_only_lines_around_the_difference_are_shown_and_no_row_is_wider_than_the_terminal(columns):
    long = "\n".join(f"{number} " + "y" * 200 for number in range(40))
    shown = side_by_side({"alone": (long, "a", long), "among 32": (long, "b", long)}).splitlines()
    assert len(shown) == 2 + SHOWN_LINES
    assert all(len(line) <= columns for line in shown)
    assert [line.strip()[:2] for line in shown[2 : 2 + LINES_BEFORE]] == ["36", "37", "38"]
    assert "«a»" in shown[2 + LINES_BEFORE]
    assert "«b»" in shown[2 + LINES_BEFORE]


def test_a_terminal_gets_colours_unless_they_are_not_wanted(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    texts = {"alone": ("", "a", ""), "among 32": ("", "b", "")}
    assert "\x1b[1;97;41ma\x1b[0m" in side_by_side(texts)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "«a»" in side_by_side(texts)
