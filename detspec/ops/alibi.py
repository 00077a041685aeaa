"""Attention with linear biases (Press et al. 2022, arXiv 2108.12409): scores fall with distance, by a slope per head."""

import jax
import jax.numpy as jnp
import numpy as np

from detspec.ops import collectives


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes `[N]` of `N` heads, float32, computed in float64 (section 3 and its footnote on other numbers of heads).

    For a power of two they are the geometric sequence with first term and ratio `2 ** (-8 / N)`. For other numbers they are
    the sequence of the next smaller power of two, then every other slope of the next larger one:

        N 4    2**-2  2**-4  2**-6  2**-8
        N 6    2**-2  2**-4  2**-6  2**-8     2**-1  2**-3
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    between = _geometric_slopes(2 * smaller)[::2]
    return np.concatenate([_geometric_slopes(smaller), between[: num_heads - smaller]]).astype(np.float32)


def own_slopes(num_heads: int) -> jax.Array:
    """The slopes `[N]` of this chip's `num_heads` heads, which are its part of the heads of all chips."""
    return collectives.own(alibi_slopes(num_heads * collectives.num_chips()))


def _geometric_slopes(num_heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 / num_heads * np.arange(1, num_heads + 1))


def lower_scores(scores: jax.Array, slopes: jax.Array, distance: jax.Array) -> jax.Array:
    """`scores - slopes * distance` in float32, for shapes that broadcast; `distance`, int32, is query minus key position.

    A soft cap is applied before: applied after, it would make all distances beyond some bound equal.
    """
    return scores - slopes * distance.astype(jnp.float32)
