"""Prompts in tables as lines of JSON: parquet, Arrow's files and streams, shards, and folders of Hugging Face's `datasets`.

Row 7 of a table with a column `prompt` is read as the line `{"id": "7", "prompt": "..."}`, so all that holds for lines holds
for rows: checks, rejected ones, chunks, audits. Rows stream: memory holds one row group of a parquet file, or one batch.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.extras import install_command
from detspec.jobs.file_kinds import ARROW_FILE, PARQUET, refuse_foreign, refuse_other_text
from detspec.jobs.prompts import DATA, START, Mark, Prompts, hash_file
from detspec.jobs.table_columns import (
    CHAT,
    METADATA,
    as_json,
    check_metadata,
    choose_columns,
    column_types,
    line_key,
    means_chat,
    metadata_cell,
    text_cell,
)
from detspec.jobs.table_files import is_table, table_files, table_kind
from detspec.say import say

BATCH_ROWS = 256
MOST_PEEKED = 1000  # lines that may tell what a text is
MOST_SHOWN = 40  # characters of a text that is named


class TablePrompts:
    """A table of prompts, read row by row; a context manager. It has the attributes and methods of `Prompts`."""

    def __init__(self, source: str, *, column: str | None = None, id_column: str | None = None) -> None:
        """Opens and hashes the files of `source`.

        `column` holds texts, token ids or conversations, by default the first of `COLUMNS` that there is. `id_column` holds
        texts or integers; the id is the number of the row if it is None. A column `metadata` of objects, or of JSON texts of
        such, travels with the lines. Any other is passed over, and a line on stderr says so.

        Raises `InputError` if a file is missing or no table, or a column is missing or holds something else.
        """
        self.source = source
        self.name = source
        self._files = table_files(source)
        self._kinds = [table_kind(path) for path in self._files]
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise InputError(f"{source} is a table, which pyarrow reads: {install_command(DATA)}") from error
        try:
            self._stamp = self._changed()
            digests = [hash_table(path) for path in self._files]
        except OSError as error:
            raise InputError(f"--prompts {error.filename}: {error.strerror}") from error
        schemas = {path: read_schema(path, kind) for path, kind in zip(self._files, self._kinds, strict=True)}
        self.columns = choose_columns(schemas, source, column, id_column)
        kinds = column_types(schemas, self.columns.prompt)
        (self._key,) = {line_key(kind, self.columns.prompt, source) for kind in kinds}
        try:
            if self.columns.metadata is not None:
                check_metadata(column_types(schemas, METADATA), source)
                self._check_first_metadata()
        except InputError as error:
            self.columns = self.columns._replace(metadata=None)
            say(f"warning: the column {METADATA!r} is passed over: {error}")
        facts = [digests, [self.columns.prompt, self.columns.id, *([METADATA] if self.columns.metadata else [])]]
        self.sha256 = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self._is_chat = self._key == "prompt" and self._begins_as_chat()

    def __enter__(self) -> "TablePrompts":
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: no file stays open."""

    @property
    def options(self) -> dict[str, str | None]:
        """The columns that are read, but for metadata."""
        return {"column": self.columns.prompt, "id_column": self.columns.id}

    def lines(self, start: Mark = START) -> Iterator[tuple[Mark, bytes]]:
        """Yields rows as lines with their places; `InputError` if the files changed since they were opened."""
        number = 0
        for skipped, rows in self._batches(start.number):
            if self._changed() != self._stamp:
                raise InputError(f"{self.name} was changed while the job read it: start the job again, and do not change it")
            number += skipped
            for line in () if rows is None else self._lines_of(rows, number):
                if number >= start.number:
                    yield Mark(number, number + 1, 0), json.dumps(line, ensure_ascii=False).encode()
                number += 1

    def marks(self, size: int) -> Iterator[Mark]:
        """Yields where each block of `size` rows begins."""
        total = sum(skipped for skipped, _ in self._batches(None))
        return (Mark(number, number + 1, 0) for number in range(0, total, size))

    def advice(self, raw: bytes) -> str:
        """Says what to do with a text that is not the conversation that it seems to be; "" for other rows."""
        if self._key != "prompt" or isinstance(json.loads(raw).get(CHAT, []), list):
            return ""
        return (
            f'; if it is no conversation, write column {self.columns.prompt!r} as lines {{"id": ..., "prompt": ...}}, where '
            "any text is completed as it is; if it is one message, put [ and ] around it, in each row"
        )

    def _lines_of(self, rows: Any, number: int) -> Iterator[dict[str, Any]]:
        """The lines of a batch whose first row has this number."""
        prompts = self._cells(rows, self.columns.prompt)
        ids = itertools.count(number) if self.columns.id is None else self._cells(rows, self.columns.id)
        metadata = itertools.repeat(None) if self.columns.metadata is None else self._cells(rows, self.columns.metadata)
        for prompt, id, extra in zip(prompts, ids, metadata, strict=False):
            asked = text_cell(prompt, is_chat=self._is_chat) if self._key == "prompt" else {self._key: prompt}
            yield {"id": str(id) if isinstance(id, int) else id, **asked, **metadata_cell(extra)}

    def _cells(self, rows: Any, name: str) -> Iterator[Any]:
        """The cells of a column in a batch as JSON has them."""
        kind = rows.schema.field(name).type
        try:
            cells = rows.column(rows.schema.get_field_index(name)).to_pylist()
        except UnicodeDecodeError as error:
            raise InputError(f"{self.name}: column {name!r} holds a text that is not UTF-8 ({error})") from error
        return (as_json(cell, kind) for cell in cells)

    def _begins_as_chat(self) -> bool:
        """Whether a column of texts holds conversations: by its name, or by its first text."""
        name = self.columns.prompt
        return name == CHAT or means_chat(next((cell for cell in self._column(name) if cell is not None), ""))

    def _check_first_metadata(self) -> None:
        """Raises `InputError` if metadata are texts, and the first that says anything is no JSON object."""
        cell = next((cell for cell in self._column(METADATA) if metadata_cell(cell)), None)
        if cell is not None and not isinstance(metadata_cell(cell)[METADATA], dict):
            raise InputError(f"{self.name}: its first text, {cell[:MOST_SHOWN]!r}, is no JSON object")

    def _column(self, name: str) -> Iterator[Any]:
        """The cells of a column, as JSON has them."""
        return (cell for _, rows in self._batches(0, [name]) if rows is not None for cell in self._cells(rows, name))

    def _batches(self, first: int | None, names: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
        """How many rows are passed over, and batches of rows with these columns, by default all that are read.

        Row `first` and those after it are read, none if None.
        """
        number = 0
        for path, kind in zip(self._files, self._kinds, strict=True):
            for skipped, rows in read_rows(path, kind, names or self.columns.names, None if first is None else first - number):
                yield skipped, rows
                number += skipped + (0 if rows is None else rows.num_rows)

    def _changed(self) -> list[tuple[int, int]]:
        """Size and modification time of each file."""
        return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in self._files)]


def open_prompts(source: str, *, column: str | None = None, id_column: str | None = None) -> Prompts | TablePrompts:
    """The prompts in `source`: a table, or else lines, as its first bytes say.

    Raises `InputError` for a file of another kind, and for columns of lines.
    """
    if is_table(source):
        return TablePrompts(source, column=column, id_column=id_column)
    prompts = Prompts(source)
    try:
        refuse_foreign(prompts.head, prompts.name)
        refuse_other_text((raw for _, raw in itertools.islice(prompts.lines(), MOST_PEEKED)), prompts.name)
        if column is not None or id_column is not None:
            raise InputError(f"--column and --id-column are for tables such as parquet files, {source} holds lines")
    except InputError:
        prompts.__exit__()
        raise
    return prompts


def hash_table(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hash_file(file)


# Rows of one file ---------------------------------------------------------------------------------------------------------


def read_schema(path: Path, kind: str) -> Any:
    """Reads the schema of a file of this kind; `InputError` if it is damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if kind == PARQUET:
            return parquet.read_schema(path)
        with pa.memory_map(str(path)) as source, _reader(source, kind) as reader:
            return reader.schema
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no table that can be read: {error}") from error


def read_rows(path: Path, kind: str, names: Sequence[str], first: int | None) -> Iterator[tuple[int, Any]]:
    """Yields how many rows are passed over, and batches of rows with these columns at least; one of both is 0 or None.

    Row `first` of the file and those after it are read, none if it is None. Raises `InputError` if the file is damaged.
    """
    import pyarrow as pa

    number = 0
    try:
        for num_rows, read in (_parquet if kind == PARQUET else _arrow)(path, kind, names):
            number += num_rows
            if first is None or number <= first:
                yield num_rows, None
            else:
                for rows in read():
                    yield 0, rows
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged, or ends early: {error}") from error


def _parquet(path: Path, _: str, names: Sequence[str]) -> Iterator[tuple[int, Callable[[], Iterator[Any]]]]:
    """The number of rows in each group, and what reads them; a batch would else be filled from several groups."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            yield num_rows, functools.partial(file.iter_batches, BATCH_ROWS, row_groups=[group], columns=names)


def _arrow(path: Path, kind: str, _: Sequence[str]) -> Iterator[tuple[int, Callable[[], Iterator[Any]]]]:
    """The number of rows in each batch, and what cuts it into smaller ones."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, _reader(source, kind) as reader:
        written = map(reader.get_batch, range(reader.num_record_batches)) if kind == ARROW_FILE else reader
        for rows in written:
            yield rows.num_rows, functools.partial(_parts, rows)


def _parts(rows: Any) -> Iterator[Any]:
    """`rows` as batches of at most `BATCH_ROWS`."""
    return (rows.slice(begin, BATCH_ROWS) for begin in range(0, rows.num_rows, BATCH_ROWS))


def _reader(source: Any, kind: str) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(source) if kind == ARROW_FILE else pa.ipc.open_stream(source)
