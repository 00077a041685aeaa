"""Some sequences of a state as a state of their own, and back; page pools are never copied.

state of 4 sequences   take [2 0]   state of 2 sequences, page tables and all, over the same pools
"""

from typing import Any

import jax

from detspec.state import GenState

CHANGED = ("tokens", "logprobs", "committed", "live", "finish")  # by steps, besides riders, cache and draft


def take_sequences(state: GenState, chosen: jax.Array) -> GenState:
    """The state of sequences `chosen [b]` alone; cache pools, and what sequences share, pass along whole."""
    nothing: Any = ()
    cache = state.cache.replace(pools=nothing)
    riders = state.riders.replace(shared=nothing)
    own = state.replace(cache=cache, riders=riders, draft=state.draft.replace(shared=nothing))
    part = jax.tree.map(lambda x: x[chosen], own)
    return part.replace(
        cache=part.cache.replace(pools=state.cache.pools),
        riders=part.riders.replace(shared=state.riders.shared),
        draft=part.draft.replace(shared=state.draft.shared),
    )


def put_sequences(state: GenState, chosen: jax.Array, part: GenState) -> GenState:
    """`state` with what steps change of sequences `chosen [b]`, all different, taken from `part`, and with `part`'s pools."""

    def put(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[chosen].set(y), old, new)

    changed = {rider.name for rider in state.riders.each if rider.changes}
    riders = {name: put(old, part.riders.states[name]) if name in changed else old for name, old in state.riders.states.items()}
    return state.replace(
        **{name: put(getattr(state, name), getattr(part, name)) for name in CHANGED},
        riders=state.riders.replace(states=riders),
        cache=state.cache.replace(length=put(state.cache.length, part.cache.length), pools=part.cache.pools),
        draft=part.draft.replace(sequences=put(state.draft.sequences, part.draft.sequences)),
    )
