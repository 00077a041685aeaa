"""Thoughts as a rider: it reads prompts up to their last chunk, and puts states into the stream of the next one."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError, ParameterError
from detspec.model.params import Params
from detspec.riders.rider import Entry, Reader, Rider
from detspec.schedule import Schedule
from detspec.state import NO_TOKEN, GenState
from detspec.thinking.blocks import thinking_of
from detspec.thinking.drafts import DRAFTED
from detspec.thinking.reading import NAME, Reading, init_reading, reading_of
from detspec.thinking.think_prompt import think_prompt
from detspec.thinking.thoughts import is_trivial, thought_lists


@cache
def thinking_rider(drafted: str = "none") -> Rider:
    """The rider of a model that thinks; `drafted` names how thoughts are drafted, see `EngineConfig.thoughts`."""
    return Rider(
        name=NAME,
        init=init_reading,
        pack=_pack,
        begin=_begin,
        reader=Reader(
            read=partial(_read, drafted),
            unread=_unread,
            inject=Reading.inject,
            reads=_reads,
            report=_report,
            found=_found,
            passes=_passes,
            spoilt=_spoilt,
            difference=_difference,
        ),
    )


def drafted_by(state: GenState, drafted: str) -> GenState:
    """`state`, with thoughts drafted in another way."""
    each = tuple(thinking_rider(drafted) if rider.name == NAME else rider for rider in state.riders.each)
    return state.replace(riders=state.riders.replace(each=each))


def thinks(cfg: ModelConfig, sampling: Any) -> bool:
    """Whether the prompt of a request with these `SamplingParams` is read thinking."""
    return cfg.thinking is not None and sampling.thinking is not False


def check_thinking(cfg: ModelConfig, sampling: Any) -> None:
    """Raises `InputError` for `SamplingParams` that a model of `cfg` cannot think by."""
    if sampling.thinking and cfg.thinking is None:
        raise ParameterError("thinking", "is true, but the model has no thinker and no compressor")
    if thinks(cfg, sampling) and sampling.prompt_logprobs is not None:
        why = "is not reported of prompts that are read thinking: omit it, or set thinking false"
        raise ParameterError("prompt_logprobs", why)


def _pack(like: Reading, entries: Sequence[Entry], eos_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Drafted thoughts, int32 `[n, X, M]`, trivial where an entry brings none; and how many chunks are thought about, `[n]`.

    Raises `InputError` if a thought has no token, or more than `M`.
    """
    X, M = like.thoughts.shape[1:]
    packed = np.full((len(entries), X, M), NO_TOKEN, np.int32)
    packed[:, :, 0] = like.end_id
    for b, entry in enumerate(entries):
        for i, thought in enumerate(entry.brings.get(NAME, ())[:X]):
            if not 0 < len(thought) <= M:
                raise InputError(
                    f"the drafted thought after chunk {i} of request {b} has {len(thought)} tokens; accepted are 1 to {M}, "
                    "the one that ends it included"
                )
            packed[b, i] = [*thought, *[NO_TOKEN] * (M - len(thought))]
    end = [0 if entry.sampling.thinking is False else (len(entry.prompt) - 1) // like.chunk for entry in entries]
    return packed, np.asarray(end, np.int32)


def _begin(packed: tuple[jax.Array, jax.Array], like: Reading) -> Reading:
    thoughts, end = packed
    return like.replace(thoughts=thoughts, end=end, read=jnp.zeros_like(like.read), states=jnp.zeros_like(like.states))


def _read(
    drafted: str,
    params: Params,
    cfg: ModelConfig,
    state: GenState,
    new: jax.Array,
    *,
    schedule: Schedule,
    max_passes: jax.Array | None,
) -> GenState:
    """Drafts the thoughts of new sequences that bring none; those that come back bring their own. Then reads."""
    if drafted != "none":  # else trivial thoughts were packed
        reading = reading_of(state)
        brings_none = is_trivial(reading.thoughts, reading.end_id).all(1)
        ahead = DRAFTED[drafted](params, cfg, state.replace(live=state.live & new & brings_none), schedule)
        state = ahead.replace(live=state.live)
    return think_prompt(params, cfg, state, schedule=schedule, max_passes=max_passes)


def _unread(reading: Reading) -> jax.Array:
    return reading.unread


def _reads(request: Any) -> bool:
    """A sequence that skipped a shared page would lack its thoughts and their states."""
    return request.sampling.thinking is True


def _report(reading: Reading) -> jax.Array:
    return reading.thoughts


def _found(cfg: ModelConfig, thoughts: np.ndarray, prompt_len: int, length: int) -> list[list[int]]:
    """Token ids of the thought after each chunk that has been read."""
    return thought_lists(thoughts[: min(length, prompt_len - 1) // thinking_of(cfg).chunk])


def _passes(cfg: ModelConfig, prompt_len: int, length: int) -> int:
    C = thinking_of(cfg).chunk
    return max(0, (prompt_len - 1) // C - length // C)


def _spoilt(cfg: ModelConfig, reading: Reading, b: int) -> list[list[int]]:
    """The thoughts of sequence `b`, every third of them changed."""
    thoughts = thought_lists(np.asarray(reading.thoughts[b, : int(reading.read[b])]))
    for thought in thoughts[b % 3 :: 3]:
        thought[0] = (thought[0] + 1) % cfg.vocab_size
    return thoughts


def _difference(reading: Reading, b: int, other: Reading, place: int) -> str:
    same: Any = (np.asarray(reading.thoughts[b]) == np.asarray(other.thoughts[place])).all(-1)
    if chunks := np.flatnonzero(~same[: int(reading.read[b])]).tolist():
        found, again = (thought_lists(np.asarray(x[chunks[:1]]))[0] for x in (reading.thoughts[b], other.thoughts[place]))
        return f"the thought of sequence {b} after chunk {chunks[0]} is {found}, in place {place} after other drafts {again}"
    if np.asarray(reading.states[b]).tobytes() != np.asarray(other.states[place]).tobytes():
        return f"the states of sequence {b} after its last thought have other bits in place {place}"
    return ""
