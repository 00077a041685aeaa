"""Products of integer models on Hopper GPUs, by a kernel in Pallas: the same integers as those of `ops.integer`."""

import jax
import jax.numpy as jnp

from detspec.integer.spec import Activations, IntMatrix
from detspec.ops import integer
from detspec.ops.linear.pallas_gpu import integer_sums


def products(row: Activations, *matrices: IntMatrix, interpret: bool = False) -> list[jax.Array]:
    """Products of `row [R, n]` with several matrices `[m, n]`: fixed `[R, m]` of each.

    Both words of a row are rows of one product, which reads the matrices once.
    """
    words = jnp.concatenate(integer.split(row.values))
    sums = integer_sums(words, [matrix.values for matrix in matrices], interpret=interpret)
    return [integer.of_sums(row, matrix, *jnp.split(each, 2)) for matrix, each in zip(matrices, sums, strict=True)]
