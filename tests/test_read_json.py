"""The one reader of JSON from outside: bounded and strict; all else is one `InputError`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detspec import read_json
from detspec.errors import InputError
from detspec.read_json import LFS_POINTER, MAX_DEPTH, differing_entries, parse_json, read_bounded, read_json_object
from tests.hostile import MARK, RAW, as_bytes, damaged, outcome, refusal, values

SOUND = {"a": [1, 2.5, True, None], "b": {"c": 'é " \\ [', "d": []}}


def test_json_of_any_depth_up_to_the_bound_reads_as_the_standard_library_reads_it():
    for document in (SOUND, [SOUND] * 200, "[" * MAX_DEPTH, {'"[\\': ["]"] * 300}):
        assert parse_json(json.dumps(document).encode()) == document
    at_most = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(at_most.encode())) == at_most
    assert "levels deep" in refusal(lambda: parse_json(f"[{at_most}]".encode()))
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[" * 200_000 + b"]" * 200_000, "nested more than 100 levels deep"),
        (b'{"a":' * 200_000, "nested more than 100 levels deep"),
        (b'"' + b'\\"' * 300_000 + b"[" * 200, "is not JSON: Unterminated string"),
        (b"9" * 5000, "Exceeds the limit"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "names the key 'c' twice"),
        (b'{"a": 1,\n "b"}', r"is not JSON: .*\(line 2, column 5\)"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\udc00": 1}', "half of a surrogate pair"),
        (b"\xff", r"is not UTF-8 \(byte 1\)"),
        (b"", "is not JSON"),
        (b"\0", "is not JSON"),
    ],
    ids=["lists", "objects", "quotes", "digits", "twice", "syntax", "surrogate", "surrogate_key", "utf8", "empty", "nul"],
)
def test_json_that_is_none_or_hostile_is_one_error(raw, message):
    with pytest.raises(InputError, match=message):
        parse_json(raw)
    refusal(lambda: parse_json(raw))


@given(st.one_of(damaged(SOUND), values.map(as_bytes), st.binary(max_size=20)))
def test_any_bytes_are_read_or_refused(raw):
    found = outcome(lambda: parse_json(raw))
    if not isinstance(found, InputError):  # then it can be written and read again
        assert repr(parse_json(json.dumps(found).encode())) == repr(found)


def test_marks_are_replaced_by_raw_text():
    assert as_bytes({"a": f"{MARK}0@"}) == b'{"a": ' + RAW[0].encode() + b"}"


def test_file_is_read_if_it_is_a_bounded_regular_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    assert read_json_object(path) is None
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}
    monkeypatch.setattr(read_json, "MAX_FILE_BYTES", 7)
    with pytest.raises(InputError, match="more than the 0 MiB"):
        read_json_object(path)
    with pytest.raises(InputError, match="no regular file"):
        read_json_object(tmp_path)
    path.write_text("[]")
    with pytest.raises(InputError, match=r"a\.json holds no JSON object but list"):
        read_json_object(path, name="a.json")


def test_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "a.json").write_bytes(LFS_POINTER + b"v1\noid sha256:4d7a\nsize 12\n")
    for read in (read_json_object, lambda path: read_bounded(path, 1000)):
        with pytest.raises(InputError, match=r"a\.json is a pointer of git-lfs, not the file itself"):
            read(tmp_path / "a.json")


def test_entries_that_differ_are_those_of_the_worked_example():
    theirs, ours = {"a": {"b": 1, "d": [1]}, "c": 2}, {"a": {"b": 3, "d": [1]}}
    assert list(differing_entries(theirs, ours)) == [("a.b", 1, 3), ("c", 2, None)]
    assert list(differing_entries(theirs, theirs)) == []
