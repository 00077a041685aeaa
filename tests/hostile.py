"""JSON that a sound program never writes, for tests that a reader either takes it or raises one `InputError`."""

import json
import time
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from detspec.errors import MAX_MESSAGE, InputError

MOST_SECONDS = 15.0  # of processor time; the slowest takes 2 on a machine that does much else
# Text that stands in a document in place of a value; `json.dumps` writes none of it.
RAW = (
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "9" * 5000,
    "1" + "0" * 400,
    "1" + "0" * 30,
    "-0",
    "1e308",
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"\\u0000"',
    '{"a": 1, "a": 2}',
    "[" * 200_000 + "]" * 200_000,
    '{"a":' * 200_000 + "1" + "}" * 200_000,
    "[" * 900 + "]" * 900,
    "[" * 99 + "]" * 99,
    '"' + "x" * 1_000_000 + '"',
    "[" + "0," * 200_000 + "0]",
    "{}",
    "",
)
MARK = "@raw "

numbers = st.one_of(st.integers(-2, 8), st.sampled_from([2**31 - 1, 2**31, 2**63, 10**9, 0.5, -0.5, 1.0]), st.floats())
texts = st.one_of(st.sampled_from(["", "\0", "..", "../x", "/etc/passwd", "é", "\ufeff", "a" * 300]), st.text(max_size=6))
raws = st.integers(0, len(RAW) - 1).map(lambda i: f"{MARK}{i}@")
atoms = st.one_of(st.none(), st.booleans(), numbers, texts, raws)
values = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | raws, inner, max_size=3), max_leaves=6
)


def as_bytes(document: Any) -> bytes:
    """`document` as JSON, with the raw texts in the place of their marks."""
    text = json.dumps(document)
    for i, raw in enumerate(RAW):
        text = text.replace(f'"{MARK}{i}@"', raw)
    return text.encode()


def damaged(document: Any) -> st.SearchStrategy[bytes]:
    """`document` with one to three parts replaced, left out or added, as JSON; then perhaps with broken bytes."""
    edits = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "drop", "add"]), values), min_size=1, max_size=3)
    return st.builds(_broken, edits.map(lambda edits: as_bytes(_edited(document, edits))), _breaks)


_breaks = st.one_of(
    st.none(), st.none(), st.none(), st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" \n", b"[", b"{"]), st.floats(0, 1)
)


def _broken(raw: bytes, change: bytes | float | None) -> bytes:
    """`raw` behind some bytes, or cut at a part of its length."""
    if isinstance(change, float):
        return raw[: int(change * len(raw))]
    return (change or b"") + raw


def _edited(document: Any, edits: list[tuple[int, str, Any]]) -> Any:
    """A copy of `document` after `edits`: each names a place by number, counted through all lists and objects."""
    document = json.loads(json.dumps(document))
    for number, kind, value in edits:
        places = list(_places(document))
        if not places:
            return value
        parent, key = places[number % len(places)]
        if kind == "drop":
            del parent[key]
        elif kind == "put":
            parent[key] = value
        elif isinstance(parent, list):
            parent.insert(key, value)
        else:
            parent[value if isinstance(value, str) else f"{key}x"] = value
    return document


def _places(document: Any) -> Any:
    """Each entry inside `document` as its list or object and its key."""
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in list(keys):
        yield document, key
        yield from _places(document[key])


def outcome(read: Callable[[], Any]) -> Any:
    """Result of `read`, or the `InputError` that it raises, with a short message; either takes a few seconds at most."""
    start = time.process_time()
    try:
        found = read()
    except InputError as error:
        found = error
    assert not isinstance(found, InputError) or len(str(found)) <= MAX_MESSAGE + len(" [...] ")
    assert time.process_time() - start < MOST_SECONDS
    return found


def refusal(read: Callable[[], Any]) -> str:
    """The message of the `InputError` that `read` must raise within seconds."""
    found = outcome(read)
    assert isinstance(found, InputError), f"was read: {str(found)[:200]}"
    return str(found)
