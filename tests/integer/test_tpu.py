"""Noise of integer models by the kernel for TPUs, in Pallas's simulator."""

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import spec
from detspec.ops import integer_tpu


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 96), (9, 2500)])  # less than a block, and more than one, both ways
def test_noise_by_the_kernel_is_that_of_the_definition(rows: int, vocab_size: int):
    rng = np.random.default_rng(rows)
    seed, position = rng.integers(-(2**31), 2**31, rows), rng.integers(0, 2**17, rows)
    found = integer_tpu.gumbel(jnp.asarray(seed, jnp.int32), jnp.asarray(position, jnp.int32), vocab_size, interpret=True)
    expected = spec.gumbel(seed, position, vocab_size)
    np.testing.assert_array_equal(found, expected)
    assert (expected != spec.gumbel(seed + 1, position, vocab_size)).any(), "the control: other seeds"
