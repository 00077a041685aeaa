"""Slopes of heads, as the paper gives them."""

import numpy as np
import pytest

from detspec.ops.alibi import alibi_slopes


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
        (16, [-(n + 1) / 2 for n in range(16)]),
    ],
)
def test_slopes_are_the_papers_rounded_once(num_heads, exponents):
    slopes = alibi_slopes(num_heads)
    assert slopes.dtype == np.float32
    assert slopes.tolist() == [float(np.float32(2.0**exponent)) for exponent in exponents]
