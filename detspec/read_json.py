"""JSON from outside, read in one place: bounded, strict, and one `InputError` for whatever is wrong with it."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detspec.errors import InputError

MAX_DEPTH = 100  # objects and lists inside each other; JSON schemas of tools, the deepest that we know, have about 20
MAX_FILE_BYTES = 64 << 20  # the largest index files have about 10 MB
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
# Text that git-lfs leaves in the place of a large file until that is fetched.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_ADVICE = "is a pointer of git-lfs, not the file itself: fetch that with `git lfs pull`"
BRACKET = re.compile(rb"[\[\]{}]")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class RepeatedKey(InputError):
    """An object names a key twice.

    Attributes:
        key: the key, as valid text.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"names the key {key!r} twice in one object")
        self.key = key.encode(errors="replace").decode()  # it may hold half a surrogate pair


def parse_json(raw: bytes) -> Any:
    """The value that `raw` holds: UTF-8, with or without a byte order mark.

    NaN, Infinity and 1e400 become floats that are not finite; the caller checks its numbers.

    Raises `RepeatedKey` for a key twice in one object, and `InputError` for no UTF-8 or no JSON; more than 100 levels; an
    integer of more than 4300 digits; half a surrogate pair.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(raw):
        raise InputError(f"is JSON that cannot be read: it is nested more than {MAX_DEPTH} levels deep")
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise InputError(f"is not JSON: {error.msg} ({line}column {error.colno})") from error
    except InputError:
        raise
    except (RecursionError, ValueError) as error:
        raise InputError(f"is JSON that cannot be read: {error}") from error
    if SURROGATE.search(raw):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError("holds one half of a surrogate pair, which is not valid text") from error
    return value


def read_json_object(path: Path, *, name: str | None = None) -> dict[str, Any] | None:
    """The JSON object in the file `path`, which errors call `name` (default: the path); None if there is no such file.

    Raises `InputError` for no regular file, one of more than 64 MiB, one that cannot be read, or one that holds no JSON object.
    """
    raw = read_bounded(path, MAX_FILE_BYTES, name=name)
    if raw is None:
        return None
    name = name or str(path)
    try:
        value = parse_json(raw)
    except InputError as error:
        raise InputError(f"{name} cannot be read: it {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{name} holds no JSON object but {type(value).__name__}")
    return value


def read_bounded(path: Path, max_bytes: int, *, name: str | None = None) -> bytes | None:
    """The bytes of the file `path`, which errors call `name` (default: the path); None if there is no such file.

    Raises `InputError` for no regular file, one of more than `max_bytes`, a pointer of git-lfs, or one that cannot be read.
    """
    name = name or str(path)
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise InputError(f"{name} is no regular file")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    if raw.startswith(LFS_POINTER):
        raise InputError(f"{name} {LFS_ADVICE}")
    if len(raw) > max_bytes:
        raise InputError(f"{name} has more than the {max_bytes >> 20} MiB that are accepted")
    return raw


def differing_entries(theirs: Any, ours: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields dotted name and both values of each entry in which two nested records differ; None stands for a missing one.

    {"a": {"b": 1}, "c": 2}, {"a": {"b": 3}}   ->   ("a.b", 1, 3), ("c", 2, None)
    """
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in dict.fromkeys((*theirs, *ours)):
            yield from differing_entries(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
    elif theirs != ours:
        yield name, theirs, ours


def _is_deep(raw: bytes) -> bool:
    """Whether more than `MAX_DEPTH` brackets are open at once; those in strings do not count: 2 are in `[{"a": "["}]`."""
    depth = 0
    for bracket in BRACKET.findall(STRING.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RepeatedKey(twice)
    return found
