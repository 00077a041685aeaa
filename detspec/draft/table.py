"""The table of draft sources by name.

"none"    no draft: windows of one token
"self"    the model's own fast path
"ngram"   what followed the last tokens before
"int8"    the model with its matrices in int8
"""

from collections.abc import Mapping
from types import MappingProxyType

from detspec.draft.given import NONE
from detspec.draft.ngram import ngram
from detspec.draft.self_draft import INT8, SELF
from detspec.draft.source import Drafter, DraftSource
from detspec.errors import InputError

SOURCES: Mapping[str, DraftSource] = MappingProxyType({source.name: source for source in (NONE, ngram(), INT8, SELF)})


def source_of(name: str) -> DraftSource:
    """The draft source called `name`, one of `SOURCES`; `InputError` if there is none of that name."""
    if name not in SOURCES:
        raise InputError(f"there is no draft source called {name!r}: choose one of {tuple(SOURCES)}")
    return SOURCES[name]


def drafters_of(
    more: Mapping[str, Drafter] = MappingProxyType({}), *, prompt_lookup_min: int = 2, prompt_lookup_max: int = 4
) -> dict[str, Drafter]:
    """All draft sources by name: those of `SOURCES`, which need no weights of their own, and `more`.

    Prompt lookup looks for the last `prompt_lookup_min` to `prompt_lookup_max` tokens.

    Raises `InputError` if `more` takes a name of `SOURCES`, or "auto".
    """
    if taken := [name for name in more if name in (*SOURCES, "auto")]:
        raise InputError(f"the name {taken[0]!r} is taken: drafters must have names other than {(*SOURCES, 'auto')}")
    sources = {**SOURCES, "ngram": ngram(prompt_lookup_min, prompt_lookup_max)}
    return {**{name: Drafter(source) for name, source in sources.items()}, **more}
