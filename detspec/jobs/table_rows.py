"""The rows of one file of a table: parquet, or Arrow's files and streams, read batch by batch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.jobs.file_kinds import ARROW_FILE, PARQUET

BATCH_ROWS = 256


def read_schema(path: Path, kind: str) -> Any:
    """The schema of a file of this kind; `InputError` if it is damaged."""
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
