"""The columns of a table that prompts are made of: which there are, what their types are in a line, and their cells as JSON.

A column of texts holds conversations if its name is `messages`, or its first text is meant as one. Then each of its texts has
to be the JSON of a conversation. In other columns of texts none may be. So no conversation is completed as if it were a text.

Arrow gives each object of a column the keys of all others, with null in place of what an object lacks. So keys of objects
whose value is null are left out, at any depth. Nulls in lists and maps stay: there they were written.

A column `metadata` holds objects, or their JSON texts if the first text that says anything is such. Any other is passed over.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from detspec.errors import InputError
from detspec.read_json import parse_json

COLUMNS = ("prompt", "messages", "prompt_token_ids", "token_ids", "text")  # looked for in this order
CHAT = "messages"
METADATA = "metadata"
CHAT_START = re.compile(r"""\s*\[\s*\{[^{}]*["']role["']\s*:""")  # also of Python's `str(messages)`, which is no JSON


class Columns(NamedTuple):
    """Names of the columns that are read; None for those that are not.

    Attributes:
        prompt: texts, token ids or conversations.
        id: texts or integers.
        metadata: objects that travel to the output.
    """

    prompt: str
    id: str | None
    metadata: str | None

    @property
    def names(self) -> list[str]:
        """The columns that are there."""
        return [name for name in self if name is not None]


def choose_columns(schemas: Mapping[Path, Any], source: str, column: str | None, id_column: str | None) -> Columns:
    """The columns to read of files with these schemas, metadata if any has them.

    Raises `InputError` if there are none such, or ids are of a type that they cannot have.
    """
    schema = next(iter(schemas.values()))
    if column is None:
        column = next((name for name in COLUMNS if name in schema.names), None)
    named = ", ".join(schema.names)
    if column is None:
        raise InputError(f"{source} has none of the columns {', '.join(COLUMNS)}: name one of {named} with --column")
    for name, option in ((column, "--column"), (id_column, "--id-column")):
        if name is not None and name not in schema.names:
            raise InputError(f"{source} has no column {name!r}: name one of {named} with {option}")
    for kind in () if id_column is None else column_types(schemas, id_column):
        if not _is_text(kind) and not _is_integer(kind):
            raise InputError(f"{source}: column {id_column!r} holds {kind}; accepted as ids are texts and integers")
    has_metadata = METADATA not in (column, id_column) and any(METADATA in each.names for each in schemas.values())
    return Columns(column, id_column, METADATA if has_metadata else None)


def column_types(schemas: Mapping[Path, Any], name: str) -> list[Any]:
    """The types of a column in files with these schemas, but for files where all is null.

    Raises `InputError` for a file that has no such column, or several, or holds other things in it than a file before it.
    """
    kinds = {}
    whole = ""
    for path, schema in schemas.items():
        if (count := schema.names.count(name)) != 1:
            there = (
                f"several columns {name!r}: give them names of their own" if count else f"no column {name!r}, as others have"
            )
            raise InputError(f"{path} has {there}")
        kinds[path] = stored(schema.field(name).type)
        found = _content(kinds[path])
        if not found.startswith(whole) and not whole.startswith(found):
            other, kind = next((file, kind) for file, kind in kinds.items() if _content(kind) == whole)
            raise InputError(f"{path} has other columns than {other}: {name}: {kinds[path]}; there {name}: {kind}")
        whole = max(found, whole, key=len)
    return [kind for kind in kinds.values() if _content(kind) == whole]


def line_key(kind: Any, column: str, source: str) -> str:
    """Names the key that a column of this type is in a line, texts a "prompt"; `InputError` if it is none."""
    import pyarrow as pa

    kind = stored(kind)
    if _is_text(kind):
        return "prompt"
    if is_list(kind):
        inner = stored(kind.value_type)
        if _is_integer(inner):
            return "prompt_token_ids"
        if pa.types.is_struct(inner) or pa.types.is_map(inner):
            _check_json(kind, column, source)
            return CHAT
    raise InputError(
        f"{source}: column {column!r} holds {kind}; accepted are texts, lists of integers (token ids), and lists of objects or "
        "JSON texts of such (conversations)"
    )


def stored(kind: Any) -> Any:
    """The type of the values themselves, whatever holds them: a dictionary, runs, or an extension of Arrow's types."""
    import pyarrow as pa

    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def is_list(kind: Any) -> bool:
    """Whether the values of a type are lists, of any of Arrow's layouts."""
    import pyarrow as pa

    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def as_json(value: Any, kind: Any) -> Any:
    """A cell of type `kind` as JSON has it; `InputError` if a map names a key twice."""
    import pyarrow as pa

    kind = stored(kind)
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_struct(kind):
        return {field.name: as_json(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if pa.types.is_map(kind):
        found = {key: as_json(item, kind.item_type) for key, item in value}
        if len(found) < len(value):
            raise InputError(f"a map has a key twice: {', '.join(str(key) for key, _ in value)}")
        return found
    return [as_json(part, kind.value_type) for part in value] if pa.types.is_nested(stored(kind.value_type)) else value


def metadata_cell(value: Any) -> dict[str, Any]:
    """A cell of metadata as an entry of a line: none for null and blank texts; numbers that are not finite become null."""
    if isinstance(value, str):
        value = json_or_text(value) if value.strip() else None
    return {} if value is None else {METADATA: _finite(value)}


def text_cell(text: str | None, *, is_chat: bool) -> dict[str, Any]:
    """A cell of texts as an entry of a line. A text that may not be in its column becomes "messages", which no text can be."""
    if is_chat:
        return {CHAT: text if text is None else json_or_text(text)}
    return {CHAT if text is not None and means_chat(text) else "prompt": text}


def json_or_text(text: str) -> Any:
    """The value of a text that is JSON; else the text."""
    try:
        return parse_json(text.encode())
    except InputError:
        return text


def means_chat(text: str) -> bool:
    """Whether a text is meant as a conversation: a list of objects with roles, whole or not; or an object that holds such."""
    start = text.lstrip()[:1]
    if not start or start not in "[{":
        return False
    value = json_or_text(text)
    if isinstance(value, dict):
        return {"role", "content"} <= value.keys() or isinstance(value.get(CHAT), list)
    if isinstance(value, list):
        return any(isinstance(message, dict) and "role" in message for message in value)
    return CHAT_START.match(text) is not None


def check_metadata(kinds: Sequence[Any], source: str) -> None:
    """Raises `InputError` if a column of one of these types cannot hold metadata."""
    import pyarrow as pa

    for kind in kinds:
        if pa.types.is_struct(kind) or pa.types.is_map(kind):
            _check_json(kind, METADATA, source)
        elif not _is_text(kind) and not pa.types.is_null(kind):
            raise InputError(f"{source}: column {METADATA!r} holds {kind}; accepted are objects, or JSON texts of such")


def _content(kind: Any) -> str:
    """Names what values of a type are in a line. The name of a type that holds null alone begins those of all it goes with."""
    import pyarrow as pa

    kind = stored(kind)
    if pa.types.is_null(kind):
        return ""
    if is_list(kind):
        return f"lists of {_content(kind.value_type)}"
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return "objects"
    return "texts" if _is_text(kind) else "integers" if _is_integer(kind) else str(kind)


def _finite(value: Any) -> Any:
    """`value` with null for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_json(kind: Any, path: str, source: str) -> None:
    """Raises `InputError` if values of the type `kind`, at `path`, hold what JSON has no value for, or a key twice."""
    import pyarrow as pa

    types = pa.types
    kind = stored(kind)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise InputError(f"{source}: {path} has a key twice: {', '.join(names)}")
        for field in kind:
            _check_json(field.type, f"{path}.{field.name}", source)
    elif types.is_map(kind):
        if not _is_text(stored(kind.key_type)):
            raise InputError(f"{source}: {path} has keys of type {kind.key_type}; accepted are texts")
        _check_json(kind.item_type, f"{path}.*", source)
    elif is_list(kind):
        _check_json(kind.value_type, f"{path}[]", source)
    elif not any(test(kind) for test in (_is_text, _is_integer, types.is_boolean, types.is_floating, types.is_null)):
        raise InputError(f"{source}: {path} holds {kind}, which JSON has no value for: cast it to texts or numbers")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_integer(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind))
