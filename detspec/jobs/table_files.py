"""The files of a table: one file, a folder of Hugging Face's `datasets`, or shards such as `train-00000-of-00002.parquet`.

Shards are files in one folder whose names differ in numbers alone, and the numbers order them.
"""

import glob
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from detspec.errors import InputError
from detspec.jobs.file_kinds import HEAD_BYTES, PACKED, TABLES, kind_of, refuse_foreign
from detspec.read_json import read_json_object

STATE = "state.json"
SPLITS = "dataset_dict.json"
SUFFIXES = (".parquet", ".parq", ".pq", ".arrow", ".arrows", ".feather", ".ipc")  # files in a folder that are looked at
OF = re.compile(r"(.*?)(\d+)-of-(\d+)([-.].*)?")  # a part of a whole, perhaps with a hash or a codec after it
NUMBER = re.compile(r"(\d+)")
MOST_NAMED = 10


def is_table(source: str) -> bool:
    """Whether `source` is a folder, a pattern of names, or a file that begins as a table does."""
    path = Path(source)
    return path.is_dir() or _is_pattern(source) or (path.is_file() and kind_of(_head(path)) in TABLES)


def table_kind(path: Path) -> str:
    """Tells which of `TABLES` the file is; `InputError` if it is none, or cannot be read."""
    head = _head(path)
    kind = kind_of(head)
    if kind in TABLES:
        return kind
    if kind not in PACKED:
        refuse_foreign(head, str(path))
    how = f"it is packed by {kind}" if kind in PACKED else f"it begins with {head[:8].hex(' ') or 'nothing'}"
    raise InputError(f"{path} is no table that can be read ({how}); accepted are parquet and Arrow's files and streams")


def table_files(source: str) -> list[Path]:
    """The files of a table, in the order of their rows; `InputError` if `source` is none, or a file is missing."""
    path = Path(source)
    if _is_pattern(source):
        files = sorted(found for name in glob.glob(source) if (found := Path(name)).is_file())
        if not files:
            raise InputError(f"--prompts {source}: no file has such a name")
        _refuse_lines(files, source)
        return in_order(files, source)
    if not path.is_dir():
        return [path]
    if (splits := read_json_object(path / SPLITS)) is not None:
        names = ", ".join(str(path / str(name)) for name in splits.get("splits", []))
        raise InputError(f"{path} has several splits: name one of {names}")
    state = read_json_object(path / STATE)
    return _shards(path) if state is None else _saved(path, state)


def in_order(files: Sequence[Path], source: str) -> list[Path]:
    """`files` in the order of the numbers in their names; `InputError` for several tables, and a missing or doubled shard."""
    patterns = sorted({_pattern(path) for path in files})
    if len(patterns) > 1:
        choices = ", ".join(f"'{name}'" for name in patterns[:MOST_NAMED])
        raise InputError(f"{source} holds {len(patterns)} tables: name one, in quotes, with --prompts: {choices}")
    parts = {path: match for path in files if (match := OF.fullmatch(path.stem))}
    if len(parts) < len(files):
        return sorted(files, key=lambda path: [int(part) if part.isdecimal() else part for part in NUMBER.split(path.stem)])
    counts = sorted({int(match[3]) for match in parts.values()})
    if len(counts) > 1:
        raise InputError(f"{source} holds shards of {' and of '.join(map(str, counts))}: remove those of one of the tables")
    by_index: dict[int, Path] = {}
    for path, match in parts.items():
        if (other := by_index.setdefault(int(match[2]), path)) != path:
            raise InputError(f"{source}: {other.name} and {path.name} are the same shard: remove one of them")
    (count,) = counts
    numbers = range(1, count + 1) if count in by_index else range(count)  # some begin with 1
    if strange := sorted(number for number in by_index if number not in numbers):
        raise InputError(f"{source}: {by_index[strange[0]].name} is none of {count} shards")
    if len(by_index) < count:
        path, match = next(iter(parts.items()))
        end = f"*{path.suffix}" if match[4] else path.suffix
        missing = itertools.islice((number for number in numbers if number not in by_index), MOST_NAMED)
        names = ", ".join(f"{match[1]}{number:0{len(match[2])}}-of-{match[3]}{end}" for number in missing)
        raise InputError(f"{source}: {count - len(by_index)} of {count} shards missing: {names}")
    return [by_index[number] for number in numbers]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"--prompts {path}: {error.strerror}") from error


def _refuse_lines(files: Sequence[Path], source: str) -> None:
    """Raises `InputError` if none of the files that a pattern names is a table."""
    heads = [_head(path) for path in files]
    kinds = [kind_of(head) for head in heads]
    if any(kind in TABLES for kind in kinds):
        return
    if kinds[0] not in PACKED:
        refuse_foreign(heads[0], str(files[0]))
    raise InputError(
        f"--prompts {source}: patterns are for tables, and {files[0]} is none. Files of lines are joined by `cat`, also packed "
        f"ones: cat {source} > FILE"
    )


def _is_pattern(source: str) -> bool:
    return glob.has_magic(source) and not Path(source).exists()


def _pattern(path: Path) -> str:
    """Returns the pattern that all shards of one table match: `x/train-00001-of-00002.parquet` -> `x/train-*-of-*.parquet`."""
    match = OF.fullmatch(path.stem)
    stem = f"{match[1]}*-of-*" if match else NUMBER.sub("*", path.stem)
    return str(path.with_name(stem + path.suffix.lower()))


def _shards(folder: Path) -> list[Path]:
    """The shards in a folder that `datasets` did not write."""
    if files := _tables_in(folder):
        return in_order(files, str(folder))
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir() and _tables_in(child)]
    lines = sorted(path.name for path in folder.iterdir() if ".jsonl" in path.suffixes)
    hint = ""
    if inner:
        hint = f"; name one of {', '.join(map(str, inner[:MOST_NAMED]))}"
    elif lines:
        hint = (
            f"; files of lines are joined by `cat`, also packed ones: cat {folder}/*{''.join(Path(lines[0]).suffixes)} > FILE"
        )
    raise InputError(
        f"{folder} is a folder without {STATE} and without tables: accepted are those that `Dataset.save_to_disk` wrote, and "
        f"shards such as train-00000-of-00002.parquet ({', '.join(SUFFIXES)}){hint}"
    )


def _tables_in(folder: Path) -> list[Path]:
    """Files that are tables by their names; hidden ones, and such as Spark's `_metadata`, are none."""
    try:
        found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
    except OSError as error:
        raise InputError(f"--prompts {folder}: {error.strerror}") from error
    return sorted(path for path in found if path.name[0] not in "._")


def _saved(folder: Path, state: dict[str, object]) -> list[Path]:
    """The files of a folder that `Dataset.save_to_disk` wrote."""
    if state.get("_indices_data_files"):
        raise InputError(f"{folder} holds rows and an order of them: write it again with `flatten_indices().save_to_disk`")
    files = state.get("_data_files")
    found = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    if not found or not all(isinstance(name, str) and Path(name).name == name for name in found):
        raise InputError(f"{folder / STATE} names no files: accepted are folders that `Dataset.save_to_disk` wrote")
    return [folder / str(name) for name in found]
