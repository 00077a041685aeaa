"""How much work a chat template may do: an allowance of steps and characters, and limits of single values.

All of it is counted, nothing is measured: whether a template renders does not depend on the machine.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jinja2

MAX_SOURCE = 1 << 17  # characters of a template
MAX_STEPS = 2_000_000
MAX_CHARS = 1 << 26  # characters of all texts of a rendering

REREADING = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"}
ATOMS = (int, float, type(None))
WIDE = re.compile(r"\d{5,}|\*")  # a width in a format: five digits, or given by an argument
CHEAP = 16  # characters that are copied, or compared at one place more, for the price of one that is read
NESTED = re.compile(r"\{[^{}]*\{")


class Overrun(jinja2.TemplateError):
    """A template has used up its allowance, or asked for a value that is too large."""


class Limit(NamedTuple):
    """The largest value of a kind that a template may make."""

    kind: str  # as errors name it, with a place for its size
    most: int

    def check(self, size: int) -> None:
        """Raises `Overrun` for a larger one."""
        if size > self.most:
            raise Overrun(f"it makes {self.kind.format(size)}, accepted are up to {self.most}")


TEXT = Limit("a text of {} characters", 1 << 22)  # or all texts in one value
ENTRIES = Limit("a list or an object of {} entries", 1 << 18)  # entries of its entries included
INTEGER = Limit("an integer of {} bits", 1 << 14)


class Allowance:
    """The work that one rendering may still do."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Starts anew, before each rendering."""
        self.steps = MAX_STEPS
        self.chars = MAX_CHARS

    def step(self, count: int = 1) -> None:
        """Counts `count` steps."""
        self.steps -= count
        if self.steps < 0:
            raise Overrun(f"it takes more than {MAX_STEPS} steps: are there loops inside loops?")

    def read(self, num_chars: int) -> None:
        """Counts a text."""
        self.chars -= num_chars
        if self.chars < 0:
            raise Overrun(f"it makes texts of more than {MAX_CHARS} characters in all")

    def weigh(self, value: Any, *, whole: bool = False) -> Any:
        """Counts what is inside `value`, an object that is there twice counts twice; returns `value`.

        Characters of a text count, and those of texts inside a list or an object if the `whole` of it is to be read.
        """
        self.step()
        if isinstance(value, str):
            TEXT.check(len(value))
            self.read(len(value))
        elif isinstance(value, int):
            INTEGER.check(value.bit_length())
        elif not isinstance(value, ATOMS):
            num_values, num_chars = size_of(value)
            self.step(num_values)
            self.read(num_chars if whole else 0)
        return value


def size_of(value: Any) -> tuple[int, int]:
    """Values inside `value`, and characters of the texts among them: 3 and 4 for `["ab", "ab"]`.

    Raises `Overrun` if they are more than `ENTRIES` or `TEXT` allows.
    """
    todo = [value]
    num_values = num_chars = 0
    while todo:
        part = todo.pop()
        num_values += 1
        if isinstance(part, str):
            num_chars += len(part)
        elif isinstance(part, list | tuple):
            todo.extend(part)
        elif isinstance(part, range):
            num_values += len(part)
        elif isinstance(part, ATOMS):
            continue
        elif isinstance(part, Mapping):
            todo.extend(part.keys())
            todo.extend(part.values())
        elif isinstance(part, Collection):
            todo.extend(part)
        ENTRIES.check(num_values + len(todo))
    TEXT.check(num_chars)
    return num_values, num_chars


def method_cost(name: str, receiver: Any, args: tuple[Any, ...]) -> int:
    """Characters that the method `name` of a text reads of it, without those of `args`."""
    if name in ("endswith", "startswith"):
        return 0
    sought = max((len(arg) for arg in args if isinstance(arg, str)), default=0)
    # Python looks for these from the end, and for each of many characters, in a number of steps that is a product.
    return len(receiver) * (1 + sought // CHEAP if name in REREADING else 1)


def check_format(text: str, mark: str, values: Any) -> None:
    """Raises `Overrun` if `text`, whose fields begin with `mark`, may become huge with `values` in it."""
    if mark in text and (WIDE.search(text) or (mark == "{" and NESTED.search(text))):
        raise Overrun(f"widths in formats must be numbers up to 9999, got {text[:100]!r}")
    TEXT.check(text.count(mark) * size_of(values)[1])


def check_result(name: str, receiver: Any, args: tuple[Any, ...]) -> None:
    """Raises `Overrun` if the method or filter `name` of a text, called with `args`, may give a huge result."""
    TEXT.check(max((abs(arg) for arg in args if isinstance(arg, int)), default=0))
    if name == "replace" and len(args) >= 2:
        TEXT.check(receiver.count(args[0]) * len(str(args[1])) + len(receiver))
    elif name == "join" and args and isinstance(args[0], Collection):
        TEXT.check(len(receiver) * len(args[0]))
    elif name == "indent" and args:
        width = args[0] if isinstance(args[0], int) else len(str(args[0]))
        TEXT.check(len(receiver) + width * len(receiver.splitlines()))
