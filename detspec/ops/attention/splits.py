"""Merges the attention results over parts of a KV sequence, for fast decoding."""

import jax
import jax.numpy as jnp


def merge_splits(m: jax.Array, l: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges the online softmax of parts, `m, l [X, splits, K, rows]` and `o [X, splits, K, rows, H]`, into `l` and `o`.

    A part without keys to attend to gets weight 0, as long as another part has some.
    """
    weight = jnp.exp(m - m.max(1, keepdims=True))
    return (l * weight).sum(1), (o * weight[..., None]).sum(1)
