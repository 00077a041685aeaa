"""Some sequences of a state as a state of their own, and back; page pools are never copied.

state of 4 sequences   take [2 0]   state of 2 sequences, page tables and all, over the same pools
"""

from typing import Any

import jax

from detspec.state import GenState


def take_sequences(state: GenState, chosen: jax.Array) -> GenState:
    """The state of sequences `chosen [b]` alone; cache pools and `draft.shared` pass along whole."""
    return _joined(jax.tree.map(lambda x: x[chosen], _apart(state)), state)


def put_sequences(state: GenState, chosen: jax.Array, part: GenState) -> GenState:
    """`state` with sequences `chosen [b]`, all different, replaced by those of `part`, and `part`'s pools."""
    return _joined(jax.tree.map(lambda x, y: x.at[chosen].set(y), _apart(state), _apart(part)), part)


def _apart(state: GenState) -> GenState:
    """`state` without what its sequences share, so that each leaf is `[B, ...]`."""
    nothing: Any = ()
    return state.replace(cache=state.cache.replace(k=nothing, v=nothing), draft=state.draft.replace(shared=nothing))


def _joined(apart: GenState, like: GenState) -> GenState:
    """`apart` with what the sequences of `like` share."""
    cache = apart.cache.replace(k=like.cache.k, v=like.cache.v)
    return apart.replace(cache=cache, draft=apart.draft.replace(shared=like.draft.shared))
