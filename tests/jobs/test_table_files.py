"""Which files are one table, and in which order: shards by the numbers in their names, none missing."""

import datetime
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from detspec.errors import InputError
from detspec.jobs.tables import open_prompts


def write(folder: Path, *names: str, **columns) -> Path:
    """Files of one row, whose prompt is the file's own name."""
    folder.mkdir(exist_ok=True)
    for name in names:
        parquet.write_table(pa.table({"prompt": [name], **columns}), folder / name)
    return folder


def read(source: Path | str) -> list[str]:
    return [json.loads(raw)["prompt"] for _, raw in open_prompts(str(source)).lines()]


@pytest.mark.parametrize(
    "names",
    [
        [f"train-0000{i}-of-00003.parquet" for i in range(3)],
        [f"train-0000{i}-of-00003-{'abc'[i] * 8}.parquet" for i in (0, 1, 2)],
        [f"part-{i}-of-12.parquet" for i in range(1, 13)],
        [f"part.{i}.parquet" for i in (2, 9, 10)],
        [f"0000{i}.PARQ" for i in range(2)],
        ["x.parquet"],
    ],
)
def test_shards_are_read_in_the_order_of_their_numbers(names, tmp_path):
    write(tmp_path / "data", *reversed(names))
    (tmp_path / "data" / "README.md").write_text("x")
    (tmp_path / "data" / "_metadata.parquet").write_text("x")
    (tmp_path / "data" / ".part.parquet").write_text("x")
    assert read(tmp_path / "data") == names


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train-00000-of-00002.parquet"], r"data: 1 of 2 shards missing: train-00001-of-00002\.parquet"),
        (["train-00001-of-00003.parquet"], "2 of 3 shards missing: train-00000-of-00003.parquet, train-00002-of-00003"),
        (["a-00000-of-00002-ff.parquet"], r"missing: a-00001-of-00002\*\.parquet"),
        (["a-0-of-99999999999.parquet"], "99999999998 of 99999999999 shards missing: a-1-of-"),
        (["a-0-of-2.parquet", "a-1-of-2.parquet", "a-1-of-3.parquet"], "shards of 2 and of 3"),
        (["a-0-of-2-x.parquet", "a-0-of-2-y.parquet"], "a-0-of-2-x.parquet and a-0-of-2-y.parquet are the same shard"),
        (["a-0-of-2.parquet", "a-5-of-2.parquet"], "a-5-of-2.parquet is none of 2 shards"),
        (["a-0-of-0.parquet"], "is none of 0 shards"),
        (["test-0-of-1.parquet", "train-0-of-1.parquet"], r"holds 2 tables: .* '\S*/data/test-\*-of-\*\.parquet', "),
        (["train.parquet", "test.parquet"], "holds 2 tables"),
        (["train-0-of-1.parquet", "other.parquet"], "holds 2 tables"),
    ],
)
def test_shards_that_are_not_one_whole_are_named(names, said, tmp_path):
    with pytest.raises(InputError, match=said):
        open_prompts(str(write(tmp_path / "data", *names)))


def test_pattern_names_one_of_several_tables(tmp_path):
    write(tmp_path / "data", "test-0-of-1.parquet", "train-0-of-2.parquet", "train-1-of-2.parquet")
    assert read(tmp_path / "data" / "train-*-of-*.parquet") == ["train-0-of-2.parquet", "train-1-of-2.parquet"]
    assert read(tmp_path / "data" / "train-0-of-2.parquet") == ["train-0-of-2.parquet"]
    with pytest.raises(InputError, match="no file has such a name"):
        open_prompts(str(tmp_path / "data" / "valid*"))
    with pytest.raises(InputError, match="holds 2 tables"):
        open_prompts(str(tmp_path / "data" / "*"))


def shards(folder: Path, *tables: pa.Table) -> str:
    folder.mkdir()
    for i, table in enumerate(tables):
        parquet.write_table(table, folder / f"a-{i}-of-{len(tables)}.parquet")
    return str(folder)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"prompt": [[1]]},
            r"a-1-of-2.parquet has other columns than \S*a-0-of-2.parquet: prompt: list<.*; there prompt: string",
        ),
        ({"text": ["b"]}, "a-1-of-2.parquet has no column 'prompt', as others have"),
        ({"prompt": ["b"], "key": [1.5]}, "other columns than .*: key: double; there key: string"),
    ],
)
def test_shards_whose_columns_hold_other_things_are_named(other, said, tmp_path):
    options = {"id_column": "key"} if "key" in other else {}
    with pytest.raises(InputError, match=said):
        open_prompts(shards(tmp_path / "x", pa.table({"prompt": ["a"], "key": ["k"]}), pa.table(other)), **options)


EMPTY = pa.table({"prompt": pa.array([], pa.null()), "key": pa.array([], pa.null())})
ALIKE = {
    "columns that are not read": [
        pa.table({"prompt": [text], "key": [text], text: [text], "n": [n]}) for text, n in ("a1", "bx")
    ],
    "an order of columns": [pa.table({"prompt": ["a"], "key": ["a"]}), pa.table({"key": ["b"], "prompt": ["b"]})],
    "nulls where others have values": [pa.table({"x": [x], "prompt": [p], "key": [p]}) for x, p in ((None, "a"), ([1], "b"))],
    "large texts": [
        pa.table({"prompt": pa.array([text], kind), "key": pa.array([text], kind)})
        for text, kind in (("a", pa.string()), ("b", pa.large_string()))
    ],
    "dictionaries": [
        pa.table({"prompt": pa.array([text], pa.dictionary(kind, pa.string())), "key": [text]})
        for text, kind in (("a", pa.int8()), ("b", pa.int32()))
    ],
    "no rows first": [EMPTY, pa.table({"prompt": ["a", "b"], "key": ["a", "b"]})],
    "no rows last": [pa.table({"prompt": ["a", "b"], "key": ["a", "b"]}), EMPTY],
}


@pytest.mark.parametrize("difference", ALIKE)
def test_shards_may_differ_in(difference, tmp_path):
    prompts = open_prompts(shards(tmp_path / "x", *ALIKE[difference]), id_column="key")
    assert [json.loads(raw) for _, raw in prompts.lines()] == [{"id": text, "prompt": text} for text in "ab"]


def test_shards_of_other_objects_are_read_by_types_of_their_own(tmp_path):
    chats = [[{"role": "user", "content": "a"}], [{"content": "b", "role": "user", "name": "n"}]]
    empty = pa.table({"messages": [[]]})
    prompts = open_prompts(shards(tmp_path / "x", empty, *(pa.table({"messages": [chat]}) for chat in chats)))
    assert [json.loads(raw)["messages"] for _, raw in prompts.lines()] == [[], *chats]
    moment = pa.table({"messages": [[{"role": "user", "at": datetime.datetime(2026, 1, 1)}]]})
    with pytest.raises(InputError, match=r"messages\[\].at holds timestamp"):
        open_prompts(shards(tmp_path / "y", empty, pa.table({"messages": [chats[0]]}), moment))


@pytest.mark.parametrize("names", [["a.jsonl"], ["a.jsonl", "b.jsonl"], ["a-0-of-2.jsonl.gz", "a-1-of-2.jsonl.gz"]])
def test_pattern_of_lines_says_how_they_are_joined(names, tmp_path):
    for name in names:
        line = b'{"id": "a", "prompt": "b"}\n'
        (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    with pytest.raises(InputError, match=r"patterns are for tables, and \S*/a\S* is none.*: cat \S*/\*\.jsonl\* > FILE"):
        open_prompts(str(tmp_path / "*.jsonl*"))


def test_shard_that_is_no_table_is_named(tmp_path):
    folder = write(tmp_path / "data", "a-0-of-3.parquet", "a-1-of-3.parquet")
    for content, said in (
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"\x1f\x8b\x08", "packed by gzip"),
    ):
        (folder / "a-2-of-3.parquet").write_bytes(content)
        with pytest.raises(InputError, match=f"a-2-of-3.parquet is .*{said}"):
            open_prompts(str(folder))


def test_all_shards_and_their_order_are_part_of_the_digest(tmp_path):
    rows = [pa.table({"prompt": [text]}) for text in ("a", "b", "c")]
    digests = set()
    for name, (first, second) in {"0": (0, 1), "1": (1, 0), "2": (0, 2)}.items():
        folder = tmp_path / name
        folder.mkdir()
        parquet.write_table(rows[first], folder / "x-0-of-2.parquet")
        parquet.write_table(rows[second], folder / "x-1-of-2.parquet")
        digests.add(open_prompts(str(folder)).sha256)
    assert len(digests) == 3
    (tmp_path / "0").rename(tmp_path / "moved")
    assert open_prompts(str(tmp_path / "moved")).sha256 in digests


def test_folder_without_tables_says_where_some_are(tmp_path):
    write(tmp_path / "data", "x.parquet")
    with pytest.raises(InputError, match=f"without state.json and without tables: .*; name one of {tmp_path / 'data'}"):
        open_prompts(str(tmp_path))
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"joined by `cat`, also packed ones: cat \S*lines/\*\.jsonl\.gz"):
        open_prompts(str(tmp_path / "lines"))
