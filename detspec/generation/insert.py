"""Requests go into a state packed: two arrays hold all that they ask, so that programs take them fast."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.generation.packing import pack, unpack
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
    brings: dict[str, Any]  # what was packed for each rider, by name


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
    return jax.tree.map(jnp.asarray, pack_requests(state, (), ()))


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
