"""The table of draft sources by name, for tokens and for thoughts alike.

name     tokens                                  thoughts
"none"   no draft: windows of one token          trivial: there is nothing to think, as published
"self"   the model's own fast path               the model reads ahead, one chunk of each prompt a pass
"""

from collections.abc import Mapping
from types import MappingProxyType

from detspec.draft.given import NONE
from detspec.draft.self_draft import SELF
from detspec.draft.source import Drafter, DraftSource
from detspec.errors import InputError

SOURCES: Mapping[str, DraftSource] = MappingProxyType({source.name: source for source in (NONE, SELF)})


def source_of(name: str) -> DraftSource:
    """The draft source called `name`, one of `SOURCES`; `InputError` if there is none of that name."""
    if name not in SOURCES:
        raise InputError(f"there is no draft source called {name!r}: choose one of {tuple(SOURCES)}")
    return SOURCES[name]


def drafters_of(more: Mapping[str, Drafter] = MappingProxyType({})) -> dict[str, Drafter]:
    """All draft sources by name: those of `SOURCES`, which need no weights of their own, and `more`.

    Raises `InputError` if `more` takes a name of `SOURCES`, or "auto".
    """
    if taken := [name for name in more if name in (*SOURCES, "auto")]:
        raise InputError(f"the name {taken[0]!r} is taken: drafters must have names other than {(*SOURCES, 'auto')}")
    return {**{name: Drafter(source) for name, source in SOURCES.items()}, **more}
