"""Products and gates of integer models by the kernels in C are those of the definition, for scales of all sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import spec
from detspec.integer.spec import LIMIT, LOST, IntMatrix
from detspec.ops import integer_cpu

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def narrow(tree: Any) -> Any:
    """The arrays of a pytree as jax takes them."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int8 if x.dtype == np.int8 else jnp.int32), tree)


@pytest.mark.parametrize("bits", [15, 8])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 65), (3, 96), (6, 1200), (33, 31)])
def test_products_of_all_scales_are_those_of_the_definition(rows: int, inputs: int, bits: int):
    """Sums are shifted by more than 47 bits where a row of zeros is multiplied, and to the left where outputs are large."""
    rng = np.random.default_rng(inputs)
    row = spec.row_of(rng.integers(-(2**28), 2**28, (rows, inputs)) >> rng.integers(0, 28, (rows, 1)), -16)
    row = row._replace(exponent=np.where(np.arange(rows) == 2, LOST, row.exponent))
    exponent = np.arange(-85, 15)
    values = rng.integers(-127, 128, (len(exponent), inputs)).astype(np.int8)
    values[40] = 0
    matrix = IntMatrix(values, rng.integers(2**14, 2**15 + 1, len(exponent)), exponent)
    (found,) = integer_cpu.products(narrow(row), narrow(matrix), bits=bits)
    expected = spec.product(row, matrix, bits=bits)
    assert (np.asarray(found) == expected).all()
    assert (expected != spec.product(row, matrix, bits=23 - bits)).any(), "the control: the other number of bits"


def test_largest_sums_of_8_bits_are_those_of_the_definition():
    """The sums of 131,072 products of 127 and 127 fit into int32; with 128 more in each factor they would not."""
    row = spec.row_of(np.full((2, 131_072), [[2**20], [-(2**20)]]), -16)
    matrix = IntMatrix(np.full((17, 131_072), 127, np.int8), np.full(17, 2**14), np.full(17, -30))
    (found,) = integer_cpu.products(narrow(row), narrow(matrix), bits=8)
    expected = spec.product(row, matrix, bits=8)
    assert (np.asarray(found) == expected).all()
    assert spec.LIMIT > abs(int(expected[0, 0])) > 0


@pytest.mark.parametrize("spread", [False, True])
def test_gelu_gates_are_those_of_the_definition(spread: bool):
    """All gates up to where GELU is its argument, and some beyond; then rows of all sizes."""
    rng = np.random.default_rng(0)
    every = np.append(np.arange(-spec.GELU_MOST - 5, spec.GELU_MOST + 5), [LIMIT - 1, 1 - LIMIT]).reshape(1, -1)
    rows = rng.integers(-LIMIT, LIMIT + 1, (20, 96)) >> rng.integers(0, 29, (20, 1))
    for gate in (every, rows):
        up = rng.integers(-(2**20), 2**20, gate.shape)
        plain = spec.gated(gate, up, "gelu_tanh")
        found = integer_cpu.gated(narrow(gate), narrow(up), "gelu_tanh", spread=spread)
        assert all((np.asarray(a) == b).all() for a, b in zip(found, spec.spread(plain) if spread else plain, strict=True))
        assert (spec.gated(gate, up).values != plain.values).any(), "the control: SiLU"


@pytest.mark.parametrize("inner", [33, 48, 96, 1024, 7 * 2**11, 2**17])
def test_spread_gates_are_those_of_the_definition(inner: int):
    rng = np.random.default_rng(inner)
    gate, up = (rng.integers(-LIMIT, LIMIT + 1, (5, inner)) >> rng.integers(0, 29, (5, 1)) for _ in range(2))
    plain = spec.gated(gate, up)
    found = integer_cpu.gated(narrow(gate), narrow(up), spread=True)
    assert all((np.asarray(a) == b).all() for a, b in zip(found, spec.spread(plain), strict=True))
    assert inner == 33 or (spec.spread(plain).values != plain.values).any(), "the control: no transform"
