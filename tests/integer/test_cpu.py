"""Products of integer models by the kernels in C are those of the definition, for scales of all sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import spec
from detspec.integer.spec import LOST, IntMatrix
from detspec.ops import integer_cpu

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def narrow(tree: Any) -> Any:
    """The arrays of a pytree as jax takes them."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int8 if x.dtype == np.int8 else jnp.int32), tree)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 65), (3, 96), (6, 1200), (33, 31)])
def test_products_of_all_scales_are_those_of_the_definition(rows: int, inputs: int):
    """Sums are shifted by more than 47 bits where a row of zeros is multiplied, and to the left where outputs are large."""
    rng = np.random.default_rng(inputs)
    row = spec.row_of(rng.integers(-(2**28), 2**28, (rows, inputs)) >> rng.integers(0, 28, (rows, 1)), -16)
    row = row._replace(exponent=np.where(np.arange(rows) == 2, LOST, row.exponent))
    exponent = np.arange(-85, 15)
    values = rng.integers(-127, 128, (len(exponent), inputs)).astype(np.int8)
    values[40] = 0
    matrix = IntMatrix(values, rng.integers(2**14, 2**15 + 1, len(exponent)), exponent)
    (found,) = integer_cpu.products(narrow(row), narrow(matrix))
    expected = spec.product(row, matrix)
    assert (np.asarray(found) == expected).all()
    assert (expected != spec.product(row, matrix._replace(exponent=exponent + 1))).any(), "the control: another scale"
