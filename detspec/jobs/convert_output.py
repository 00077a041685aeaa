"""Outputs of jobs as parquet files, row by row.

Columns are the keys of the lines. Log-probabilities are float32, whose bits the decimals hold. What is nested deeper than a
list of numbers (likeliest tokens, thoughts, bodies of OpenAI's lines) is kept as JSON text.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from detspec.errors import InputError
from detspec.extras import install_command
from detspec.jobs.prompts import DATA, bounded_lines
from detspec.read_json import parse_json

BATCH_ROWS = 1024  # lines in memory
TEXTS = ("id", "custom_id", "text", "finish_reason", "digest", "logprobs_mode")
NUMBERS = ("index", "prompt_len")


def convert_output(source: Path, target: Path, *, fresh: bool = False) -> int:
    """Writes the lines of `source` as the parquet file `target`, which appears when it is whole; returns the number of rows.

    Raises `InputError` if pyarrow is missing, a line is no line of output, or `target` is there already and not to be `fresh`.
    """
    try:
        from pyarrow import ArrowInvalid, ArrowTypeError, Table, parquet
    except ImportError as error:
        raise InputError(f"{target} is written by pyarrow: {install_command(DATA)}") from error
    if target.exists() and not fresh:
        raise InputError(f"{target} is there already: name another file, or write over it with --fresh")
    schema = schema_of(source)
    temporary = target.with_name(f".{target.name}.tmp")
    lines = rows_of(source)
    num_rows = 0
    try:
        with parquet.ParquetWriter(temporary, schema) as writer:
            while rows := list(islice(lines, BATCH_ROWS)):
                cells = [{name: _cell(name, row.get(name)) for name in schema.names} for row in rows]
                writer.write_table(Table.from_pylist(cells, schema=schema))
                num_rows += len(rows)
        temporary.replace(target)
    except (ArrowInvalid, ArrowTypeError, OverflowError) as error:
        raise InputError(f"{source} holds what is no output of a job: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return num_rows


def schema_of(source: Path) -> Any:
    """The columns that any line has, in the order in which they first come."""
    import pyarrow as pa

    names: dict[str, None] = {}
    for row in rows_of(source):
        names |= dict.fromkeys(row)
    if not names:
        raise InputError(f"{source} holds no lines")
    kinds = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())}
    kinds |= dict.fromkeys(NUMBERS, pa.int32())
    return pa.schema([(name, kinds.get(name, pa.string())) for name in names])


def rows_of(source: Path) -> Iterator[dict[str, Any]]:
    """The lines of `source` as JSON objects; `InputError` if one is none."""
    try:
        with source.open("rb") as file:
            for number, (_, raw) in enumerate(bounded_lines(file), start=1):
                if raw.strip():
                    try:
                        row = parse_json(raw)
                    except InputError as error:
                        raise InputError(f"{source} line {number} {error}") from error
                    if not isinstance(row, dict):
                        raise InputError(f"{source} line {number} must be a JSON object, got {type(row).__name__}")
                    yield row
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from error


def _cell(name: str, value: Any) -> Any:
    """A value as its column has it."""
    if name in (*TEXTS, *NUMBERS, "token_ids", "logprobs") or value is None:
        return value
    return json.dumps(value)
