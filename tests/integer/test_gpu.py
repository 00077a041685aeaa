"""Products of integer models by the kernel for Hopper GPUs, in Pallas's simulator."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import spec
from detspec.integer.spec import IntMatrix
from detspec.ops import integer_gpu


def narrow(tree: Any) -> Any:
    """The arrays of a pytree as jax takes them."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int8 if x.dtype == np.int8 else jnp.int32), tree)


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "bits"), [(1, 15), (33, 15), (33, 8)])  # their words fill one tile of 64 rows, and two
def test_products_by_the_kernel_are_those_of_the_definition(rows: int, bits: int):
    rng = np.random.default_rng(rows)
    row = spec.row_of(rng.integers(-(2**28), 2**28, (rows, 288)), -16)
    matrices = [
        IntMatrix(
            rng.integers(-127, 128, (num, 288)).astype(np.int8), rng.integers(2**14, 2**15, num), rng.integers(-24, -16, num)
        )
        for num in (144, 20)
    ]
    found = integer_gpu.products(narrow(row), *narrow(matrices), bits=bits, interpret=True)
    expected = [spec.product(row, matrix, bits=bits) for matrix in matrices]
    assert all((np.asarray(y) == own).all() for y, own in zip(found, expected, strict=True))
    assert (expected[0][:, :20] != expected[1]).any(), "the control: another matrix"
