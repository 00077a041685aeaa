"""The results file: a line of JSON for each thing that happened, on disk before the next one begins.

    {"kind": "run", ...}           a worker says which device it has
    {"kind": "partial", ...}       entries of a measurement that goes on
    {"kind": "measurement", ...}   one measurement with its entries, or why it failed
    {"kind": "skipped", ...}       one that the time was too short for
    {"kind": "end", ...}           how a stage ended

A process may be killed at any moment: a line that is not whole is left out when the file is read, and ended when it is written.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A figure."""

    name: str
    value: float
    unit: str
    bar: float | None = None  # the least accepted value, or the largest if `at_most`
    at_most: bool = False
    bound: str = ""  # what limits it: "bandwidth", "arithmetic" or "host"; "" if nothing is timed
    note: str = ""
    predicted: float | None = None  # from bytes and operations at the device's ceilings; None if nothing is

    @property
    def holds(self) -> bool | None:
        """Whether the value keeps to its bar; None without a bar. A value that is not a number keeps to none."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def to_json(self) -> Line:
        """All fields, and `holds`."""
        return {**dataclasses.asdict(self), "holds": self.holds}


class Journal:
    """A results file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **facts: Any) -> None:
        """Appends one line, and waits until it is on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"kind": kind, **facts}, default=float) + "\n"
        with self.path.open("ab") as file:
            file.write((b"" if self._is_ended() else b"\n") + line.encode())
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[Line]:
        """All whole lines; none if there is no file."""
        if not self.path.exists():
            return []
        return [line for text in self.path.read_bytes().splitlines() if (line := _parsed(text)) is not None]

    def _is_ended(self) -> bool:
        """Whether the file is empty, or its last line is whole."""
        content = self.path.read_bytes() if self.path.exists() else b""
        return not content or content.endswith(b"\n")


def _parsed(text: bytes) -> Line | None:
    """The line; None if a killed process left a part of it."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "kind" in line else None
