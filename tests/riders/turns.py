"""A rider in one file: an automaton of two states adds a request's bias to the logits of some tokens, or does not.

Every token that is a multiple of five turns the bias on or off; it is off at first. Favoured are tokens 10, 26, 42, ...

    text    3    5    8    9    20   4
    on    no   no  yes  yes  yes   no   no        before each token, and after the last
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError
from detspec.riders.rider import Capacity, Entry, Rider, Rows
from detspec.struct import Struct


class Turns(Struct):
    """Bias of each request, and the state that its text has led to."""

    bias: jax.Array  # [B] float32; 0 for requests that bring nothing
    is_on: jax.Array  # [B] bool


def init(cfg: ModelConfig, capacity: Capacity) -> Any:
    """Sequences that bring nothing."""
    return Turns(np.zeros(capacity.num_sequences, np.float32), np.zeros(capacity.num_sequences, bool))


def facts(value: Any) -> float:
    """The bias; `InputError` for anything but a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"turns must be a number, got {value!r}")
    return float(value)


def pack(like: Turns, entries: Sequence[Entry], eos_ids: Sequence[int]) -> Any:
    """Packs the bias of each entry; its prompt says where the automaton begins."""
    bias = [facts(entry.brings.get("turns", 0)) for entry in entries]
    is_on = [sum(token % 5 == 0 for token in entry.prompt) % 2 == 1 for entry in entries]
    return Turns(np.asarray(bias, np.float32), np.asarray(is_on, bool))


def favoured(cfg: ModelConfig) -> Any:
    """`[2, V]` bool, the tokens that get the bias while it is off, which are none, and while it is on."""
    token = np.arange(cfg.vocab_size)
    return np.stack([np.zeros(cfg.vocab_size, bool), token % 16 == 10])


def follow(table: jax.Array, state: Turns, tokens: jax.Array) -> Turns:
    """Follows one more token."""
    return state.replace(is_on=state.is_on ^ (tokens % 5 == 0))


def logits(table: jax.Array, rows: Rows, logits_f32: jax.Array) -> jax.Array:
    """The bias where it applies. A product with it would not do: compilers may fuse that with the sum, and round otherwise."""
    state: Turns = rows.state
    return jnp.where(table[state.is_on.astype(jnp.int32)], logits_f32 + state.bias[:, None], logits_f32)


TURNS = Rider("turns", init=init, pack=pack, facts=facts, shared=favoured, follow=follow, logits=logits)
