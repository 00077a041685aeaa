"""Some sequences of a state as a state of their own, and back; page pools are never copied.

state of 4 sequences   take [2 0]   state of 2 sequences, page tables and all, over the same pools
"""

from typing import Any

import jax

from detspec.state import GenState

CHANGED = ("tokens", "logprobs", "committed", "live", "finish", "counters", "reading")  # by steps, besides cache and draft


def take_sequences(state: GenState, chosen: jax.Array) -> GenState:
    """The state of sequences `chosen [b]` alone; cache pools and `draft.shared` pass along whole."""
    nothing: Any = ()
    cache = state.cache.replace(pools=nothing)
    part = jax.tree.map(lambda x: x[chosen], state.replace(cache=cache, draft=state.draft.replace(shared=nothing)))
    cache = part.cache.replace(pools=state.cache.pools)
    return part.replace(cache=cache, draft=part.draft.replace(shared=state.draft.shared))


def put_sequences(state: GenState, chosen: jax.Array, part: GenState) -> GenState:
    """`state` with what steps change of sequences `chosen [b]`, all different, taken from `part`, and with `part`'s pools."""

    def put(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[chosen].set(y), old, new)

    return state.replace(
        **{name: put(getattr(state, name), getattr(part, name)) for name in CHANGED},
        cache=state.cache.replace(length=put(state.cache.length, part.cache.length), pools=part.cache.pools),
        draft=part.draft.replace(sequences=put(state.draft.sequences, part.draft.sequences)),
    )
