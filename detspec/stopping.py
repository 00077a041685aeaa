"""Which tokens end a sequence."""

import jax


def is_stop(tokens: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """True where `tokens [B, n]` is one of its sequence's `stop_ids [B, num_stop]`; `[B, n]` bool."""
    return (tokens[:, :, None] == stop_ids[:, None, :]).any(-1)
