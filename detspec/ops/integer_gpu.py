"""Products of integer models on Hopper GPUs, by a kernel in Pallas: the same integers as those of `ops.integer`."""

import jax

from detspec.integer.spec import Activations, IntMatrix
from detspec.ops import integer
from detspec.ops.linear.pallas_gpu import integer_sums


def products(row: Activations, *matrices: IntMatrix, bits: int = 15, interpret: bool = False) -> list[jax.Array]:
    """Products of `row [R, n]` with several matrices `[m, n]`: fixed `[R, m]` of each."""
    row, words = integer.in_words(row, bits)
    sums = integer_sums(words, [matrix.values for matrix in matrices], interpret=interpret)
    return [integer.of_sums(row, matrix, each, bits) for matrix, each in zip(matrices, sums, strict=True)]
