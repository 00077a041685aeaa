"""Prompts in parquet files and in folders of Hugging Face's `datasets` (`save_to_disk`), as lines of JSON.

Row 7 of a table with a column `prompt` is read as the line `{"id": "7", "prompt": "..."}`, so all that holds for lines holds
for rows: checks, rejected ones, chunks, audits. Rows stream: memory holds one row group of a parquet file, or one batch.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.jobs.prompts import START, Mark, Prompts, hash_file
from detspec.read_json import read_json_object

COLUMNS = ("prompt", "messages", "prompt_token_ids", "token_ids", "text")  # looked for in this order
BATCH_ROWS = 256
STATE = "state.json"
SPLITS = "dataset_dict.json"
INSTALL = "pip install 'detspec[data]'"


class TablePrompts:
    """A table of prompts, read row by row; a context manager. It has the attributes and methods of `Prompts`."""

    def __init__(self, source: str, *, column: str | None = None, id_column: str | None = None) -> None:
        """Opens and hashes the files of `source`.

        `column` holds texts, token ids or conversations, by default the first of `COLUMNS` that there is. `id_column` holds
        texts or integers; the id is the number of the row if it is None.

        Raises `InputError` if a file is missing or no table, or a column is missing or holds something else.
        """
        self.source = source
        self.name = source
        self._files = table_files(Path(source))
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise InputError(f"{source} is a table, which pyarrow reads: {INSTALL}") from error
        self._is_parquet = self._files[0].suffix == ".parquet"
        try:
            self._stamp = self._changed()
            digests = [hash_table(path) for path in self._files]
        except OSError as error:
            raise InputError(f"--prompts {error.filename}: {error.strerror}") from error
        schema = self._schema()
        self.columns = choose_columns(schema, source, column, id_column)
        self.sha256 = hashlib.sha256(json.dumps([digests, self.columns]).encode()).hexdigest()
        self._key = line_key(schema.field(self.columns[0]).type, self.columns[0], source)

    def __enter__(self) -> "TablePrompts":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open."""

    @property
    def options(self) -> dict[str, str | None]:
        """The columns that are read."""
        return dict(zip(("column", "id_column"), self.columns, strict=True))

    def lines(self, start: Mark = START) -> Iterator[tuple[int, int, bytes]]:
        """Yields number of the row from 0, from 1, and the row as a line; see `marked`."""
        return ((mark.number, mark.place, raw) for mark, raw in self.marked(start))

    def marked(self, start: Mark = START) -> Iterator[tuple[Mark, bytes]]:
        """Yields rows as lines with their places; `InputError` if the files changed since they were opened."""
        column, id_column = self.columns
        number = 0
        for skipped, rows in self._batches(start.number):
            if self._changed() != self._stamp:
                raise InputError(f"{self.name} was changed while the job read it: start the job again, and do not change it")
            number += skipped
            if rows is None:
                continue
            values = rows.column(rows.schema.get_field_index(column)).to_pylist()
            ids = None if id_column is None else rows.column(rows.schema.get_field_index(id_column)).to_pylist()
            for place, value in enumerate(values):
                if number >= start.number:
                    id = number if ids is None else ids[place]
                    line = {"id": str(id) if isinstance(id, int) else id, self._key: _plain(value)}
                    yield Mark(number, number + 1, 0), json.dumps(line, ensure_ascii=False).encode()
                number += 1

    def marks(self, size: int) -> Iterator[Mark]:
        """Yields where each block of `size` rows begins."""
        total = sum(skipped for skipped, _ in self._batches(None))
        return (Mark(number, number + 1, 0) for number in range(0, total, size))

    def _batches(self, first: int | None) -> Iterator[tuple[int, Any]]:
        """How many rows are passed over, and batches of rows. Row `first` and those after it are read, none if None."""
        number = 0
        for path in self._files:
            for skipped, rows in (self._parquet if self._is_parquet else self._arrow)(path, first, number):
                yield skipped, rows
                number += skipped + (0 if rows is None else rows.num_rows)

    def _parquet(self, path: Path, first: int | None, number: int) -> Iterator[tuple[int, Any]]:
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            names = [name for name in self.columns if name is not None]
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                number += num_rows
                if first is None or number <= first:
                    yield num_rows, None
                else:  # one group at a time: a batch would else be filled from several
                    for rows in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=names):
                        yield 0, rows

    def _arrow(self, path: Path, first: int | None, number: int) -> Iterator[tuple[int, Any]]:
        import pyarrow as pa

        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for rows in reader:
                number += rows.num_rows
                if first is None or number <= first:
                    yield rows.num_rows, None
                else:
                    for begin in range(0, rows.num_rows, BATCH_ROWS):
                        yield 0, rows.slice(begin, BATCH_ROWS)

    def _schema(self) -> Any:
        """The schema of the first file, which the others share."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            schemas = [parquet.read_schema(path) if self._is_parquet else _stream_schema(path) for path in self._files]
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.source} is no table that can be read: {error}") from error
        for path, schema in zip(self._files, schemas, strict=True):
            if not schema.equals(schemas[0]):
                raise InputError(f"{path} has other columns than {self._files[0]}")
        return schemas[0]

    def _changed(self) -> list[tuple[int, int]]:
        """Size and modification time of each file."""
        return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in self._files)]


def open_prompts(source: str, *, column: str | None = None, id_column: str | None = None) -> Prompts | TablePrompts:
    """The prompts in `source`: a parquet file, a folder, or else lines; `InputError` for columns of lines."""
    if source.endswith(".parquet") or Path(source).is_dir():
        return TablePrompts(source, column=column, id_column=id_column)
    if column is not None or id_column is not None:
        raise InputError(f"--column and --id-column are for parquet files and folders of datasets, {source} holds lines")
    return Prompts(source)


def table_files(path: Path) -> list[Path]:
    """The files of a table, in the order of their rows; `InputError` if `path` is none."""
    if not path.is_dir():
        return [path]
    if (splits := read_json_object(path / SPLITS)) is not None:
        names = ", ".join(str(path / str(name)) for name in splits.get("splits", []))
        raise InputError(f"{path} has several splits: name one of {names}")
    state = read_json_object(path / STATE)
    if state is None:
        raise InputError(f"{path} is a folder without {STATE}: accepted are those that `Dataset.save_to_disk` wrote")
    if state.get("_indices_data_files"):
        raise InputError(f"{path} holds rows and an order of them: write it again with `flatten_indices().save_to_disk`")
    files = state.get("_data_files")
    found = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    if not found or not all(isinstance(name, str) and Path(name).name == name for name in found):
        raise InputError(f"{path / STATE} names no files: accepted are folders that `Dataset.save_to_disk` wrote")
    return [path / str(name) for name in found]


def hash_table(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hash_file(file)


def choose_columns(schema: Any, source: str, column: str | None, id_column: str | None) -> tuple[str, str | None]:
    """Names of the columns of prompts and of ids; `InputError` if there are none such."""
    if column is None:
        column = next((name for name in COLUMNS if name in schema.names), None)
    named = ", ".join(schema.names)
    if column is None:
        raise InputError(f"{source} has none of the columns {', '.join(COLUMNS)}: name one of {named} with --column")
    for name, option in ((column, "--column"), (id_column, "--id-column")):
        if name is not None and name not in schema.names:
            raise InputError(f"{source} has no column {name!r}: name one of {named} with {option}")
    return column, id_column


def line_key(kind: Any, column: str, source: str) -> str:
    """What a column of this type is in a line; `InputError` if it is nothing."""
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "prompt"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_integer(kind.value_type):
            return "prompt_token_ids"
        if pa.types.is_struct(kind.value_type):
            return "messages"
    raise InputError(
        f"{source}: column {column!r} holds {kind}; accepted are strings, lists of integers (token ids), and lists of objects "
        "(conversations)"
    )


def _stream_schema(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        return reader.schema


def _plain(value: Any) -> Any:
    """A cell as JSON; fields of messages that are null, since other messages have them, are left out."""
    if isinstance(value, Sequence) and value and isinstance(value[0], dict):
        return [{name: part for name, part in message.items() if part is not None} for message in value]
    return value
