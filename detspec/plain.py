"""Makes plain values of Python of what users hand over: integers of any kind, lists, tuples, ranges, arrays of any library."""

from collections.abc import Sequence
from typing import Any

from detspec.errors import InputError, shown

NO_LISTS = (str, bytes, bytearray, memoryview)  # sequences to Python, though not of ids


def plain(value: Any) -> Any:
    """A number or an array of numpy, jax or their like as a number or a list of Python; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def plain_list(given: Any, sentence: str) -> list[Any]:
    """The entries of a list, a tuple, a range or an array; raises `InputError` with `sentence` if `given` is none of these."""
    values = given if isinstance(given, NO_LISTS) else plain(given)
    if isinstance(values, NO_LISTS) or not isinstance(values, Sequence):
        raise InputError(f"{sentence}, got {shown(given)}")
    return list(values)


def plain_ids(given: Any, what: str = "a prompt") -> tuple[int, ...]:
    """Token ids, integers of any kind as plain ones. What is no integer is left for `check_ids` to refuse.

    Raises `InputError`, which calls them `what`, if `given` is no list, tuple, range or array.
    """
    if type(given) is tuple and set(map(type, given)) <= {int}:  # nearly always
        return given
    values = plain_list(given, f"{what} must be token ids in a list, a tuple or an array of one dimension")
    if set(map(type, values)) <= {int}:
        return tuple(values)
    return tuple(map(_plain_int, values))


def _plain_int(token: Any) -> Any:
    value = plain(token)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
