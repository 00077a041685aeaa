"""Attention with linear biases (Press et al. 2022, arXiv 2108.12409): a key far away scores less, by a slope of the head."""

import jax
import jax.numpy as jnp
import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes `[N]` of `N` heads, float32, worked out in float64 (section 3 and its footnote on other numbers of heads).

    A power of two has the geometric sequence that begins and steps with `2 ** (-8 / N)`. Other numbers have that of the next
    smaller power of two, then every other slope of the next larger one:

        N 4    2**-2  2**-4  2**-6  2**-8
        N 6    2**-2  2**-4  2**-6  2**-8     2**-1  2**-3
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    between = _geometric_slopes(2 * smaller)[::2]
    return np.concatenate([_geometric_slopes(smaller), between[: num_heads - smaller]]).astype(np.float32)


def _geometric_slopes(num_heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 / num_heads * np.arange(1, num_heads + 1))


def lower_scores(scores: jax.Array, slopes: jax.Array, distance: jax.Array) -> jax.Array:
    """`scores - slopes * distance` in float32, of shapes that broadcast; `distance` int32, of a query's position from a key's.

    Scores are capped before, if at all: a cap bounds what one product can do, and would bound the distance's part, too, so
    that keys beyond some distance were all as near.
    """
    return scores - slopes * distance.astype(jnp.float32)
