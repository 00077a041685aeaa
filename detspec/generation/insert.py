"""Requests go into a state packed: two arrays hold all that they ask, so that programs take them fast."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.generation.packing import pack, unpack
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.state import PAD_ID, RUNNING, GenState, SamplingArrays, init_counters
from detspec.thinking.thoughts import pack_thoughts

Array = jax.Array | np.ndarray


class Entry(NamedTuple):
    """One request for one sequence of a state.

    A request that was taken out half way goes on where it stopped if its new tokens so far come with its prompt.
    """

    place: int  # which sequence of the state
    tokens: Sequence[int]  # token ids to commit
    sampling: SamplingParams  # what the request asks for
    prompt_len: int | None = None  # how many of `tokens` are the prompt, the rest being new tokens; all if None
    logprobs: Sequence[float] = ()  # log-probabilities of the new tokens among `tokens`; 0 where they are missing
    length: int = 0  # how many positions its pages hold already, less than `tokens`
    # drafted thoughts after its first chunks, for models that think; trivial after the others
    thoughts: Sequence[Sequence[int]] = ()


class Requests(NamedTuple):
    """Requests for some of `B` sequences."""

    chosen: Array  # [B] bool, sequences that get one
    packed: Array  # [B, X] int32, `_Asked` of each


class _Asked(NamedTuple):
    """What a sequence is given by its request; fields as in `GenState`, `length` as in its cache."""

    tokens: Array
    logprobs: Array
    committed: Array
    length: Array
    limit: Array
    deterministic: Array
    sampling: SamplingArrays
    thoughts: Array | None  # drafts; None if the model does not think
    end: Array | None


def pack_requests(state: GenState, entries: Sequence[Entry], eos_ids: Sequence[int]) -> Requests:
    """Checked requests for states like `state`, whose shapes are read and nothing else; places of `entries` all differ.

    Raises `InputError` if a request has more stop tokens or biased tokens than there is room for, or a drafted thought is
    unsound.
    """
    num_sequences, max_len = state.tokens.shape
    sampling = [entry.sampling for entry in entries]
    committed = np.asarray([len(entry.tokens) for entry in entries], np.int32)
    prompt_lens = [len(entry.tokens) if entry.prompt_len is None else entry.prompt_len for entry in entries]
    prompt_len = np.asarray(prompt_lens, np.int32)
    tokens = np.full((len(entries), max_len), PAD_ID, np.int32)
    logprobs = np.zeros((len(entries), max_len), np.float32)
    for i, entry in enumerate(entries):
        tokens[i, : committed[i]] = entry.tokens
        logprobs[i, prompt_lens[i] : prompt_lens[i] + len(entry.logprobs)] = entry.logprobs
    thoughts = end = None
    if state.reading is not None:
        reads_plainly = np.asarray([params.thinking is False for params in sampling], bool)
        thoughts = pack_thoughts(state.reading, [entry.thoughts for entry in entries])
        end = np.where(reads_plainly, 0, (prompt_len - 1) // state.reading.chunk).astype(np.int32)
    asked = _Asked(
        tokens=tokens,
        logprobs=logprobs,
        committed=committed,
        length=np.asarray([entry.length for entry in entries], np.int32),
        limit=prompt_len + np.asarray([params.max_tokens for params in sampling], np.int32),
        deterministic=np.asarray([params.deterministic for params in sampling], bool),
        sampling=sampling_arrays(
            sampling,
            prompt_lens,
            eos_ids=eos_ids,
            max_stop_ids=state.sampling.max_stop_ids,
            max_logit_bias=state.sampling.max_logit_bias,
        ),
        thoughts=thoughts,
        end=end,
    )
    places = [entry.place for entry in entries]
    chosen = np.zeros(num_sequences, bool)
    chosen[places] = True
    return Requests(chosen=chosen, packed=pack(asked, places, num_sequences))


def no_requests(state: GenState) -> Requests:
    """Requests for no sequence, on the device."""
    return jax.tree.map(jnp.asarray, pack_requests(state, (), ()))


def put_requests(state: GenState, requests: Requests) -> GenState:
    """`state` with `requests` in their places: prompts committed, counters at zero; `state.draft` is left as it is."""
    chosen = jnp.asarray(requests.chosen)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    reading = state.reading
    before = _Asked(
        tokens=state.tokens,
        logprobs=state.logprobs,
        committed=state.committed,
        length=state.cache.length,
        limit=state.limit,
        deterministic=state.deterministic,
        sampling=state.sampling,
        thoughts=None if reading is None else reading.thoughts,
        end=None if reading is None else reading.end,
    )
    after = jax.tree.map(put, before, unpack(jnp.asarray(requests.packed), before))
    if reading is not None:
        reading = reading.replace(
            thoughts=after.thoughts,
            end=after.end,
            read=put(reading.read, jnp.zeros_like(reading.read)),
            states=put(reading.states, jnp.zeros_like(reading.states)),
        )
    return state.replace(
        tokens=after.tokens,
        logprobs=after.logprobs,
        committed=after.committed,
        limit=after.limit,
        live=state.live | chosen,
        finish=put(state.finish, jnp.full_like(state.finish, RUNNING)),
        deterministic=after.deterministic,
        sampling=after.sampling,
        counters=jax.tree.map(put, state.counters, init_counters(chosen.shape[0])),
        cache=state.cache.replace(length=after.length),
        reading=reading,
    )


insert = jax.jit(put_requests, donate_argnames=("state",))
