"""Requests go into a state, and some sequences of a state into one of their own and back.

Requests come packed, because a program takes one array in a tenth of the time that it takes thirty. Leaves `[n, ...]` of four
bytes an element, or bool, lie next to each other as int32:

    {a: f32 [n, 2], b: bool [n]}  ->  [[a0 a1 b], ...]

Page pools are never copied:

    state of 4 sequences   take [2 0]   state of 2 sequences, page tables and all, over the same pools
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from detspec.errors import InputError
from detspec.riders.rider import Entry
from detspec.state import PAD_ID, RUNNING, GenState

Array = jax.Array | np.ndarray


class Requests(NamedTuple):
    """Requests for some of `B` sequences."""

    chosen: Array  # [B] bool, sequences that get one
    packed: Array  # [B, X] int32, `_Asked` of each


class _Asked(NamedTuple):
    """Values that a request gives its sequence; fields as in `GenState`, `length` as in its cache."""

    tokens: Array
    logprobs: Array
    committed: Array
    length: Array
    limit: Array
    deterministic: Array
    prompt_len: Array
    brings: dict[str, Any]  # packed values for each rider, by name


def pack_requests(state: GenState, entries: Sequence[Entry], eos_ids: Sequence[int]) -> Requests:
    """Checked requests for states like `state`, whose shapes are read and nothing else; places of `entries` all differ.

    Raises `InputError` if a rider cannot pack what a request brings: if it has more stop tokens or biased tokens than there is
    room for, or a value is unsound.
    """
    num_sequences = state.live.shape[0]
    places = [entry.place for entry in entries]
    chosen = np.zeros(num_sequences, bool)
    chosen[places] = True
    return Requests(chosen=chosen, packed=pack(_asked(state, entries, eos_ids), places, num_sequences))


def no_requests(state: GenState) -> Requests:
    """Requests for no sequence, on the device."""
    return jax.device_put(pack_requests(state, (), ()))


def put_requests(state: GenState, requests: Requests) -> GenState:
    """`state` with `requests` in their places: prompts committed, riders begun; `state.draft` is left as it is."""
    chosen = jnp.asarray(requests.chosen)

    def put(old: jax.Array, new: Array) -> jax.Array:
        return jnp.where(chosen.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    asked: Any = unpack(jnp.asarray(requests.packed), _asked(state, (), ()))
    tokens = put(state.tokens, asked.tokens)
    end = jnp.where(chosen, asked.committed, 0)
    return state.replace(
        tokens=tokens,
        logprobs=put(state.logprobs, asked.logprobs),
        committed=put(state.committed, asked.committed),
        limit=put(state.limit, asked.limit),
        live=state.live | chosen,
        finish=put(state.finish, jnp.full_like(state.finish, RUNNING)),
        deterministic=put(state.deterministic, asked.deterministic),
        riders=state.riders.begun(asked.brings, put, tokens, asked.prompt_len, end),
        cache=state.cache.replace(length=put(state.cache.length, asked.length)),
    )


insert = jax.jit(put_requests, donate_argnames=("state",))


def _asked(state: GenState, entries: Sequence[Entry], eos_ids: Sequence[int]) -> _Asked:
    """Packs `entries` in numpy: arrays `[n, ...]`, whose shapes depend on the state alone, but for `n`."""
    max_len = state.tokens.shape[1]
    committed = np.asarray([len(entry.tokens) for entry in entries], np.int32)
    prompt_len = np.asarray([len(entry.prompt) for entry in entries], np.int32)
    tokens = np.full((len(entries), max_len), PAD_ID, np.int32)
    logprobs = np.zeros((len(entries), max_len), np.float32)
    for i, entry in enumerate(entries):
        tokens[i, : committed[i]] = entry.tokens
        logprobs[i, prompt_len[i] : prompt_len[i] + len(entry.logprobs)] = entry.logprobs
    return _Asked(
        tokens=tokens,
        logprobs=logprobs,
        committed=committed,
        length=np.asarray([entry.length for entry in entries], np.int32),
        limit=prompt_len + np.asarray([entry.sampling.max_tokens for entry in entries], np.int32),
        deterministic=np.asarray([entry.sampling.deterministic for entry in entries], bool),
        prompt_len=prompt_len,
        brings={rider.name: rider.pack(state.riders.of(rider.name), entries, eos_ids) for rider in state.riders.each},
    )


Tree = TypeVar("Tree")


def pack(tree: Any, places: Sequence[int], num_places: int) -> np.ndarray:
    """Leaves `[n, ...]` of numpy as int32 `[num_places, width]`: entry `i` at `places[i]`, 0 elsewhere.

    Raises `InputError` for a leaf whose elements have neither four bytes nor are bool: others would shift what follows.
    """
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaf = np.asarray(leaf)
        if leaf.dtype != np.bool_ and leaf.dtype.itemsize != 4:
            raise InputError(
                f"what requests bring is packed in elements of four bytes, or bool, but {jax.tree_util.keystr(path)} has the "
                f"dtype {leaf.dtype}: give it another, such as np.int32 or np.float32"
            )
        leaves.append(leaf)
    flat = [leaf.reshape(len(places), np.prod(leaf.shape[1:], dtype=int)) for leaf in leaves]
    columns = [leaf.astype(np.int32) if leaf.dtype == np.bool_ else leaf.view(np.int32) for leaf in flat]
    packed = np.zeros((num_places, sum(column.shape[1] for column in columns)), np.int32)
    packed[list(places)] = np.concatenate(columns, axis=1)
    return packed


def unpack(packed: jax.Array, like: Tree) -> Tree:
    """The leaves that were packed, `[num_places, ...]`, structured like `like`, whose first axis is not read."""
    leaves, structure = jax.tree.flatten(like)
    found = []
    begin = 0
    for leaf in leaves:
        end = begin + int(np.prod(leaf.shape[1:]))
        column = packed[:, begin:end].reshape(packed.shape[:1] + leaf.shape[1:])
        found.append(column != 0 if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(column, leaf.dtype))
        begin = end
    return jax.tree.unflatten(structure, found)


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
