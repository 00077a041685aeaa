"""Files of prompts by what they hold, whatever they are called: packed lines are lines, and what is neither is named."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import sys
import tarfile
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.jobs import prompts as prompts_module
from detspec.jobs.prompts import Prompts
from detspec.jobs.records import Origin, PromptsById
from detspec.jobs.scan import is_openai
from detspec.jobs.tables import TablePrompts, open_prompts
from detspec.sampling_params import SamplingParams

LINES = b"".join(json.dumps({"id": f"{i}", "prompt": f"é{i}"}).encode() + b"\n" for i in range(50))
PACKED_LINES = gzip.compress(LINES)
BATCH_LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def file(folder: Path, content: bytes, name: str = "in.jsonl") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def table_bytes(write) -> bytes:
    """Returns what `write(table, file)` makes of a table of one prompt."""
    found = io.BytesIO()
    write(pa.table({"prompt": ["a"]}), found)
    return found.getvalue()


def stream(table: pa.Table, target: io.BytesIO) -> None:
    with pa.ipc.new_stream(target, table.schema) as writer:
        writer.write_table(table)


def zip_file() -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("xl/workbook.xml", "x")
    return found.getvalue()


def tar_file() -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x.jsonl"))
    return found.getvalue()


def numpy_file() -> bytes:
    found = io.BytesIO()
    np.save(found, np.arange(3))
    return found.getvalue()


PACKED = {
    "gzip": gzip.compress(LINES),
    "gzip in parts": gzip.compress(LINES[:300]) + gzip.compress(LINES[300:]),
    "zstd": zstd(LINES),
    "zstd in parts": zstd(LINES[:300]) + zstd(LINES[300:]),
    "zstd after a frame to skip": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(LINES),
}
TABLES = {"parquet": parquet.write_table, "an Arrow file": feather.write_feather, "an Arrow stream": stream}
OTHERS = {
    "CSV.*pandas.read_csv": b"id,prompt\na,b\n",
    'TSV.*sep="': b"id\tprompt\na\tb\n",
    r"jq -c '\.\[\]'": b'[{"id": "a", "prompt": "b"}]',
    "JSON, but not an object a line": b'[\n  {\n    "id": "a"\n  }\n]\n',
    "JSON, but not an object a line: ": b'[\n  "def f",\n  "def g"\n]',
    "jq -c . ": b'{\n  "id": "a"\n}\n',
    "text, but no lines of JSON .*begins with 'def f'": b"def f\ndef g\n",
    "begins with '\"def f\"'": b'"def f"\n"def g"\n',
    "bzip2.*bunzip2": bz2.compress(LINES),
    "xz.*unxz": lzma.compress(LINES),
    "zip archive.*pandas.read_excel": zip_file(),
    "tar archive": tar_file(),
    "numpy array": numpy_file(),
    "pickle": pickle.dumps([1]),
    "UTF-16 text.*iconv": LINES.decode().encode("utf-16"),
    "UTF-16 text": LINES.decode().encode("utf-16-be"),
    "UTF-32 text": LINES.decode().encode("utf-32"),
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "HTML": b"<!DOCTYPE html>\n<html>",
    "Feather of version 1": b"FEA1\0\0\0\0",
    "encrypted parquet": b"PARE\0\0\0\0",
    "ORC": b"ORC\x08\x03\x10\0",
    "PDF": b"%PDF-1.7\n",
    "is a JSON array.*jq -c 'to_entries": b'["a", "b"]\n',
    "is a JSON array": b"[1, 2]",
    "an empty JSON array, which holds no prompts": b" []\n",
    "binary, of no known kind .*01 02 00 03": b"\x01\x02\0\x03",
}


@pytest.mark.parametrize(
    "start", ["PAR1", "PARE", "FEA1", "ORC", "ORCID", "PARENT", "BZh9", "%PDF", "Obj", "Rar!", "7z", "PK", "[x]"]
)
def test_table_of_text_that_starts_with_the_letters_of_another_kind_is_called_csv(start, tmp_path):
    rows = "".join(f"{i},é{i}\n" for i in range(100))
    with pytest.raises(InputError, match="is CSV"):
        open_prompts(file(tmp_path, f"{start},prompt\n{rows}".encode()))


@pytest.mark.parametrize("word", ["ustar el texto", "ustar  y más"])
def test_line_with_the_letters_of_a_tar_archive_at_their_place_is_a_line(word, tmp_path):
    start = '{"id": "a", "prompt": "'
    content = f'{start}{"x" * (257 - len(start))}{word}"}}\n'.encode()
    assert content[257:262] == b"ustar"
    with open_prompts(file(tmp_path, content)) as prompts:
        assert [raw for _, raw in prompts.lines()] == [content[:-1]]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_archive_of_any_kind_is_named(kind, tmp_path):
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w", format=kind) as archive:
        archive.addfile(tarfile.TarInfo("x.jsonl"))
    with pytest.raises(InputError, match="is a tar archive"):
        open_prompts(file(tmp_path, found.getvalue()))


def test_orc_that_pyarrow_wrote_is_named(tmp_path):
    from pyarrow import orc

    orc.write_table(pa.table({"prompt": ["a" * 600]}), tmp_path / "x")
    with pytest.raises(InputError, match="is ORC"):
        open_prompts(str(tmp_path / "x"))


@pytest.mark.parametrize("content", [PACKED_LINES, LINES], ids=["packed", "a pipe"])
def test_copy_on_a_full_disk_is_one_error_that_names_file_and_folder(content, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts_module.tempfile, "TemporaryFile", lambda: Path("/dev/full").open("r+b"))  # noqa: SIM115
    source = file(tmp_path, content)
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    source = source if content is PACKED_LINES else f"/dev/fd/{reading}"
    with pytest.raises(OSError, match=f"{source} is (gzip|a pipe), .* in {tempfile.gettempdir()}: .*TMPDIR") as found:
        open_prompts(source)
    os.close(reading)
    assert found.value.errno == errno.ENOSPC
    if content is PACKED_LINES:
        with pytest.raises(InputError, match="TMPDIR"):
            PromptsById(Path(source), Origin("", {}, {}, SamplingParams(), EngineConfig(), source="", sha256=""))
    assert (tmp_path / "in.jsonl").read_bytes() == content


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_lines_are_those_of_the_file_whatever_its_name(kind, name, tmp_path):
    with open_prompts(file(tmp_path, PACKED[kind], name)) as packed, Prompts(file(tmp_path, LINES, "plain")) as plain:
        assert list(packed.lines()) == list(plain.lines())
        assert packed.sha256 == plain.sha256
        marks = list(packed.marks(20))
        assert [next(packed.lines(mark)) for mark in marks] == [next(plain.lines(mark)) for mark in marks]


def test_digest_of_packed_lines_is_of_the_lines(tmp_path):
    digests = set()
    for content in (LINES, LINES[: len(LINES) // 2]):
        for pack in (gzip.compress, lambda raw: gzip.compress(raw, 1), zstd):
            with Prompts(file(tmp_path, pack(content))) as prompts:
                digests.add(prompts.sha256)
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["x.parq", "x.PARQUET", "x.jsonl", "x"])
@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_read_whatever_their_name(kind, name, tmp_path):
    prompts = open_prompts(file(tmp_path, table_bytes(TABLES[kind]), name))
    assert [json.loads(raw) for _, raw in prompts.lines()] == [{"id": "0", "prompt": "a"}]


def test_lines_are_read_under_the_name_of_a_table(tmp_path):
    with open_prompts(file(tmp_path, LINES, "x.parquet")) as prompts:
        assert isinstance(prompts, Prompts)


@pytest.mark.parametrize("said", OTHERS)
def test_other_files_are_refused_by_what_they_are(said, tmp_path):
    with pytest.raises(InputError, match=said):
        open_prompts(file(tmp_path, OTHERS[said]))


@pytest.mark.parametrize("said", ["CSV", "tar archive", "UTF-16 text"])
def test_what_is_packed_is_looked_at_too(said, tmp_path):
    content = next(content for name, content in OTHERS.items() if name.startswith(said))
    with pytest.raises(InputError, match=said):
        open_prompts(file(tmp_path, gzip.compress(content)))


@pytest.mark.parametrize(
    "content",
    [b"", b"\n \n", b"[INFO] start\n" + LINES, b'{"id":\n' + LINES, b"\xef\xbb\xbf" + LINES, b"{\n[\n", b"{"],
    ids=range(7),
)
def test_lines_with_a_malformed_first_one_are_still_lines(content, tmp_path):
    """Errors in that are those of the line, which may be rejected alone."""
    with open_prompts(file(tmp_path, content)) as prompts:
        assert len(list(prompts.lines())) == len([line for line in content.splitlines() if line.strip()])


DAMAGED = {
    "gzip without its end": PACKED["gzip"][:-9],
    "the first bytes of gzip": PACKED["gzip"][:60],
    "two bytes of gzip": PACKED["gzip"][:2],
    "gzip with another checksum": PACKED["gzip"][:-8] + b"\0" * 8,
    "more after gzip": PACKED["gzip"] + b"more",
    "zstd without its end": PACKED["zstd"][:-3],
    "more after zstd": PACKED["zstd"] + b"more",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_packed_file_that_is_damaged_is_one_error(damage, tmp_path):
    content = DAMAGED[damage]
    with pytest.raises(InputError, match=r"is (gzip|zstd) that is damaged, or ends early"):
        open_prompts(file(tmp_path, content))


@pytest.mark.parametrize("kind", TABLES)
def test_table_that_ends_early_is_one_error(kind, tmp_path):
    whole = table_bytes(TABLES[kind])
    for length in (len(whole) - 30, len(whole) // 2, 9):
        with pytest.raises(InputError, match=r"table that can be read|damaged, or ends early"):
            list(open_prompts(file(tmp_path, whole[:length])).lines())


def test_gzip_needs_no_pyarrow_and_zstd_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with open_prompts(file(tmp_path, PACKED["gzip"])) as prompts:
        assert len(list(prompts.lines())) == 50
    for content in (PACKED["zstd"], table_bytes(lambda _, target: target.write(b"PAR1"))):
        with pytest.raises(InputError, match=r"pip install 'pyarrow>=18'"):
            open_prompts(file(tmp_path, content))


@pytest.mark.parametrize("kind", ["gzip", "zstd", "lines"])
def test_standard_input_and_pipes_may_be_packed(kind, tmp_path, monkeypatch):
    content = PACKED.get(kind, LINES)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with open_prompts("-") as typed, open_prompts(f"/dev/fd/{reading}") as piped, Prompts(file(tmp_path, LINES)) as plain:
        assert list(typed.lines()) == list(piped.lines()) == list(plain.lines())
        assert typed.sha256 == piped.sha256 == plain.sha256
    os.close(reading)


def test_table_from_a_pipe_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(table_bytes(parquet.write_table))))
    with pytest.raises(InputError, match="stdin holds parquet, packed or from a pipe"):
        open_prompts("-")


def test_lines_named_as_a_table_in_python_are_refused(tmp_path):
    with pytest.raises(InputError, match="is no table that can be read"):
        TablePrompts(file(tmp_path, LINES))


def test_openai_lines_may_be_packed(tmp_path):
    with open_prompts(file(tmp_path, gzip.compress(BATCH_LINE))) as prompts:
        assert is_openai(prompts)


def test_line_that_unpacks_without_end_is_not_held(tmp_path, monkeypatch):
    """20 MB in 20 kB; memory holds one block of the copy, and a piece of the line."""
    monkeypatch.setattr(prompts_module, "MAX_LINE_BYTES", 100_000)
    source = file(tmp_path, gzip.compress(b'{"id": "' + b"x" * 20_000_000 + b"\n" + LINES))
    tracemalloc.start()
    with open_prompts(source) as prompts:
        assert [len(raw) for _, raw in prompts.lines()][:2] == [100_001, len(LINES.splitlines()[0])]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 6_000_000
