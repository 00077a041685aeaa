"""Tells what a file of prompts is by its first bytes, never by its name.

Read are lines of JSON, gzip and zstd of them, parquet, and Arrow's files and streams. Anything else is refused by what it is.
"""

import codecs
import contextlib
import itertools
import re
from collections.abc import Iterable

from detspec.errors import InputError
from detspec.read_json import parse_json

HEAD_BYTES = 512  # a tar archive says what it is at byte 257
BINARY = rb"(?s:.)*?[\0-\x08\x0e-\x1f]"  # after a start of letters, which a text may have: a byte that texts do not hold

GZIP = "gzip"
ZSTD = "zstd"
PARQUET = "parquet"
ARROW_FILE = "an Arrow file"
ARROW_STREAM = "an Arrow stream"
LINES = "lines"
PACKED = (GZIP, ZSTD)
TABLES = (PARQUET, ARROW_FILE, ARROW_STREAM)
READ = {
    re.compile(rb"\x1f\x8b"): GZIP,
    re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"): ZSTD,  # a frame, or one that is to be skipped
    re.compile(rb"PAR1(\Z|%s)" % BINARY): PARQUET,
    re.compile(rb"ARROW1\0\0"): ARROW_FILE,
    re.compile(rb"\xff{4}[^\xff]"): ARROW_STREAM,
}

TO_PARQUET = 'write it as parquet, `pandas.read_%s.to_parquet("x.parquet")`'
EXCEL = 'excel("{name}")'
UNPACK = "unpack it, `%s {name}`"
# What starts like this is something else: what it is, and what to do with the file `name`.
OTHERS = {
    rb"\xff\xfe\0\0|\0\0\xfe\xff": ("UTF-32 text", "write it as UTF-8, `iconv -f UTF-32 -t UTF-8 {name}`"),
    rb"\xff\xfe|\xfe\xff|[\[{]\0|\0[\[{]": ("UTF-16 text", "write it as UTF-8, `iconv -f UTF-16 -t UTF-8 {name}`"),
    rb"PK(\x03\x04|\x05\x06|\x07\x08)": (
        "a zip archive, which an .xlsx workbook is, too",
        f"{UNPACK % 'unzip'}; of a workbook {TO_PARQUET % EXCEL}",
    ),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an old workbook (.xls)", TO_PARQUET % EXCEL),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": ("bzip2", UNPACK % "bunzip2"),
    rb"\xfd7zXZ\0": ("xz", UNPACK % "unxz"),
    rb"\x04\x22\x4d\x18": ("lz4", UNPACK % "unlz4"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", UNPACK % "7z x"),
    rb"Rar!\x1a\x07": ("a rar archive", UNPACK % "unrar x"),
    rb"\x1f\x9d": ("a file of compress (.Z)", UNPACK % "uncompress"),
    rb"\xff\x06\0\0sNaPpY": ("snappy", "unpack it"),
    rb"(?s).{257}ustar(\0|  \0)": ("a tar archive", UNPACK % "tar -xf"),
    rb"PARE" + BINARY: ("encrypted parquet", "write it without encryption"),
    rb"FEA1" + BINARY: ("Feather of version 1", "write it with `pyarrow.feather.write_feather`, whose version is 2"),
    rb"ORC" + BINARY: ("ORC", TO_PARQUET % 'orc("{name}")'),
    rb"Obj\x01": ("Avro", "write it as parquet"),
    rb"\x89HDF": ("HDF5", TO_PARQUET % 'hdf("{name}")'),
    rb"SQLite format 3\0": ("a database of SQLite", "write the table as parquet"),
    rb"\x93NUMPY": ("a numpy array", "write it as parquet, or as lines"),
    rb"\x80[\x02-\x05]": ("a pickle, which may run any code when it is read", "write it as parquet"),
    rb"%PDF-\d\.\d": ("PDF", "write its text as lines"),
    rb"version https://git-lfs\.github\.com/spec/": ("a git-lfs pointer in place of the file", "`git lfs pull` fetches it"),
    rb"(?i)\s*<(!doctype\s|html[\s>]|\?xml\s)": ("HTML or XML", "fetch the file itself, or write it as lines"),
}
FOREIGN = {re.compile(start): found for start, found in OTHERS.items()}
# The first two lines of JSON that is no object a line.
WHOLE = re.compile(rb'\[\s*\{|\{\n"')  # an array of objects, or objects over several lines
ARRAY = re.compile(rb'\[\s*(["\[\]]|-?[\d.]+\s*[,\]])')  # an array of something else
SPLIT = re.compile(rb'\[\n["\[]')  # such an array over several lines
TO_LINES = "jq -c 'to_entries[] | {id: (.key | tostring), prompt: .value}'"
TEXTS = {  # by a mark in the first line
    b"\t": ("TSV, or another text, and no lines of JSON", TO_PARQUET % 'csv("{name}", sep="\\t")'),
    b",": ("CSV, or another text, and no lines of JSON", TO_PARQUET % 'csv("{name}")'),
}
PLAIN = ("text, but no lines of JSON", "give one object a line")
MOST_SHOWN = 40  # bytes of a text that is named
ACCEPTED = (
    'Accepted are lines such as {"id": "a", "prompt": "def "}, also packed by gzip or zstd, parquet, and Arrow files and '
    "streams"
)


def kind_of(head: bytes) -> str:
    """Tells a file by `head`, its first `HEAD_BYTES`: one of `PACKED` and `TABLES`, or `LINES` for the rest."""
    return next((kind for start, kind in READ.items() if start.match(head)), LINES)


def refuse_foreign(head: bytes, name: str) -> None:
    """Raises `InputError` if `head`, of what is to be read as lines, is that of a known kind that is not."""
    if (kind := kind_of(head)) in PACKED:
        raise InputError(f"{name} is {kind} inside of gzip or zstd: unpack it once")
    if kind in TABLES:
        raise InputError(f"{name} holds {kind}, packed or from a pipe, but tables are read from files of their own: write one")
    for start, (what, remedy) in FOREIGN.items():
        if start.match(head):
            raise InputError(f"{name} is {what}: {remedy.format(name=name)}. {ACCEPTED}")


def refuse_other_text(lines: Iterable[bytes], name: str) -> None:
    """Raises `InputError` if `lines`, the first ones that are not blank, are no lines of JSON objects, but another text.

    They are taken for such lines if the first begins like an object, or any is one; what is wrong with a line is said later.
    """
    stripped = (raw.removeprefix(codecs.BOM_UTF8).strip() for raw in lines)
    start = list(itertools.islice(stripped, 2))
    text = b"\n".join(start)
    if WHOLE.match(text):
        raise InputError(
            f"{name} is JSON, but not an object a line: `jq -c '.[]' {name}` writes the elements of an array so, and "
            f"`jq -c . {name}` writes objects so"
        )
    if not start or start[0].startswith(b"{"):
        return
    if not SPLIT.match(text) and any(map(_is_object, itertools.chain(start, stripped))):
        return
    first = start[0]
    if first == b"[]":
        raise InputError(f"{name} is an empty JSON array, which holds no prompts. {ACCEPTED}")
    if ARRAY.match(text):
        raise InputError(
            f"{name} is JSON, but not an object a line: it is a JSON array. `{TO_LINES} {name}` makes lines of texts"
        )
    if b"\0" in first:
        raise InputError(f"{name} is binary, of no known kind (it begins with {first[:8].hex(' ')}). {ACCEPTED}")
    what, remedy = next((found for mark, found in TEXTS.items() if mark in first), PLAIN)
    shown = first[:MOST_SHOWN].decode("utf-8", "backslashreplace")
    raise InputError(f"{name} is {what} (it begins with {shown!r}): {remedy.format(name=name)}. {ACCEPTED}")


def _is_object(raw: bytes) -> bool:
    with contextlib.suppress(InputError):
        return raw.startswith(b"{") and isinstance(parse_json(raw), dict)
    return False
