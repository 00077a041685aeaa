"""Values that a request brings for the riders of an engine, checked on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from detspec.errors import InputError
from detspec.riders.rider import Rider


class Brought(NamedTuple):
    """Checked values of a request for riders."""

    facts: dict[str, Any]  # JSON values by rider, for digests; empty if it brings nothing
    page_key: bytes | None = b""  # what its keys and values depend on besides tokens; None if it shares no pages
    is_read: bool = False  # a rider reads its prompt


NOTHING_BROUGHT = Brought({})


def brought(riders: Sequence[Rider], request: Any) -> Brought:
    """Checks the values of `request` for `riders`; raises `InputError` for a value that no rider takes."""
    takes = {rider.name: rider for rider in riders if rider.takes_values}
    if unknown := [name for name in request.brings if name not in takes]:
        names = f"those of its riders {tuple(takes)}" if takes else "none, because it has no riders that take values"
        raise InputError(f"the request brings {unknown[0]!r}, but the names that this engine takes are {names}")
    facts = {name: takes[name].facts(value) for name, value in sorted(request.brings.items())}
    reader = reader_of(riders)
    if reader is not None and reader.reader is not None and reader.reader.reads(request):
        return Brought(facts, None, is_read=True)
    keys = {rider.name: rider.page_key(request) for rider in riders}
    if None in keys.values():
        return Brought(facts, None)
    named = [name.encode() + b"\0" + key + b"\0" for name, key in sorted(keys.items()) if key]
    return Brought(facts, b"".join(named))


def reader_of(riders: Sequence[Rider]) -> Rider | None:
    """The one of `riders` that reads prompts, if there is one."""
    return next((rider for rider in riders if rider.reader is not None), None)
