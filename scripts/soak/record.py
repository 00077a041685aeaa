"""The soak's journal: a line for each trial that has ended, and one for each start, with what the bits depend on."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = "start"

Entry = dict[str, Any]


class Journal:
    """An append-only file of JSON lines.

    Attributes:
        entries: its lines so far.
    """

    def __init__(self, path: Path, *, appends: bool = False) -> None:
        """Reads the file, if there is one; with `appends`, a last line without its end, which a kill left, is cut off."""
        raw = path.read_bytes() if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if appends:
            path.touch()
            os.truncate(path, len(whole))
        self.path = path
        self.entries: list[Entry] = [json.loads(line) for line in whole.splitlines()]

    def add(self, entry: Entry) -> None:
        """Appends a line and the time to it, which survives the end of the machine."""
        entry = {**entry, "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)

    def started(self, seed: int, fingerprint: Entry) -> None:
        """Notes a start; raises `SystemExit` if the file's first one had another seed."""
        seeds = {entry["seed"] for entry in self.starts} | {seed}
        if len(seeds) > 1:
            raise SystemExit(f"{self.path} was begun with --seed {(seeds - {seed}).pop()}, not {seed}: name another --workdir")
        self.add({"kind": START, "seed": seed, "commit": commit(), "package": package(), "fingerprint": fingerprint})

    @property
    def trials(self) -> list[Entry]:
        """The lines of trials."""
        return [entry for entry in self.entries if entry["kind"] != START]

    @property
    def starts(self) -> list[Entry]:
        """The lines of starts."""
        return [entry for entry in self.entries if entry["kind"] == START]


def num_tokens(trials: Sequence[Entry]) -> int:
    """Committed tokens that were compared."""
    return sum(entry["tokens"] for entry in trials)


def num_kills(trials: Sequence[Entry]) -> int:
    """Processes that were killed."""
    return sum(sum(entry["kills"].values()) for entry in trials)


def commit() -> str:
    """The commit that is checked out, with a mark if files were changed since."""
    described = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


def package() -> str:
    """The content of the package as git names it; it stays the same when commits are put elsewhere."""
    named = ["git", "rev-parse", "--short=12", "HEAD:detspec"]
    return subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
