"""Merging what parts of a KV sequence attended to, for fast decoding."""

import jax
import jax.numpy as jnp


def merge_splits(m: jax.Array, l: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges the online softmax of parts `m, l [X, splits, K, rows]` and `o [X, splits, K, rows, H]` into `l` and `o`.

    A part with nothing to attend to weighs 0, as long as another has something.
    """
    weight = jnp.exp(m - m.max(1, keepdims=True))
    return (l * weight).sum(1), (o * weight[..., None]).sum(1)
