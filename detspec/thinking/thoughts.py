"""Thoughts as arrays: token ids up to and with the one that ends them, then NO_TOKEN.

`M = 4`, the ending token 0:

    [5 7 0 -]   two tokens     [0 - - -]   nothing to think, a trivial thought     [5 7 9 2]   cut at its fourth token
"""

import jax
import jax.numpy as jnp
import numpy as np

from detspec.state import NO_TOKEN


def thought_length(thoughts: jax.Array) -> jax.Array:
    """Tokens of `thoughts [..., M]`: int32 `[...]`."""
    return (thoughts != NO_TOKEN).sum(-1, dtype=jnp.int32)


def is_trivial(thoughts: jax.Array, end_id: int) -> jax.Array:
    """`[...]` bool, True for `thoughts [..., M]` that hold nothing before their end, and for missing ones."""
    return (thoughts[..., 0] == end_id) | (thoughts[..., 0] == NO_TOKEN)


def trivial_thoughts(shape: tuple[int, ...], end_id: int) -> jax.Array:
    """Trivial thoughts, int32 of `shape [..., M]`."""
    return jnp.full(shape, NO_TOKEN, jnp.int32).at[..., 0].set(end_id)


def cut_after_end(tokens: jax.Array, end_id: int) -> jax.Array:
    """`tokens [..., M]` as thoughts: what follows the first ending token is NO_TOKEN."""
    ended = jnp.cumsum((tokens == end_id).astype(jnp.int32), axis=-1)
    before = jnp.pad(ended, [(0, 0)] * (tokens.ndim - 1) + [(1, 0)])[..., :-1]
    return jnp.where(before == 0, tokens, NO_TOKEN)


def padded_thoughts(thoughts: jax.Array, length: int, end_id: int) -> jax.Array:
    """`thoughts [..., M]` as the compressor reads them, `[..., length]`: whatever follows their tokens is the ending token.

    A thought that was cut is closed: its last token is taken for the ending one.
    """
    M = thoughts.shape[-1]
    is_last = jnp.arange(M, dtype=jnp.int32).reshape((1,) * (thoughts.ndim - 1) + (M,)) == M - 1
    closed = jnp.where(is_last | (thoughts == NO_TOKEN), end_id, thoughts)
    return jnp.pad(closed, [(0, 0)] * (thoughts.ndim - 1) + [(0, length - M)], constant_values=end_id)


def thought_lists(thoughts: np.ndarray) -> list[list[int]]:
    """The token ids of each of `thoughts [n, M]`."""
    return [[token for token in thought if token != NO_TOKEN] for thought in np.asarray(thoughts).tolist()]
