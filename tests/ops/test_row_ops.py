"""Norm and rotary embedding: right in value, and the same bits for a row among any others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.ops.norm import rms_norm
from detspec.ops.rope import apply_rope, rope_frequencies, rope_rotation
from detspec.ops.row_sum import fixed_sum, native_sum
from tests.fakes import bits

pytestmark = pytest.mark.optimised

ROWS = (1, 2, 3, 8, 64, 256)
EPS = 1e-5


@partial(jax.jit, static_argnames=("summed_by",))
def norm(x, scale, *, summed_by=fixed_sum):
    return rms_norm(x, scale, EPS, summed_by)


@pytest.mark.parametrize("width", [64, 1000])
def test_rms_norm_equals_float64(width):
    rng = np.random.default_rng(width)
    x, scale = rng.standard_normal((5, 3, width), np.float32), rng.standard_normal(width, np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS) * scale
    # Four float32 roundings and the sum's: some 10 of 2**-24, relative.
    np.testing.assert_allclose(norm(x, scale), exact, rtol=1e-6, atol=1e-9)


def test_rms_norm_in_bfloat16_rounds_before_the_scale():
    """As Hugging Face Llama does: normed in float32, rounded to bfloat16, then scaled in bfloat16."""
    rng = np.random.default_rng(0)
    x, scale = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((7, 64), 64))
    x64 = x.astype(np.float64)
    normed = (x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)).astype(np.float32).astype(jnp.bfloat16)
    got = np.asarray(norm(x, scale))
    assert got.dtype == jnp.bfloat16
    # Where float32 and float64 stand on two sides of a rounding border, bfloat16 differs by one unit of 2**-8.
    np.testing.assert_allclose(got.astype(np.float32), (normed * scale).astype(np.float32), rtol=2**-7, atol=0)
    assert (got == normed * scale).mean() > 0.98


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 257, 1000])
def test_rms_norm_beside_any_number_of_rows_gives_the_same_bits(width, dtype):
    rng = np.random.default_rng(width)
    x, scale = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((256, width), width))
    assert len({np.asarray(norm(x[:rows], scale))[:1].tobytes() for rows in ROWS}) == 1


def test_rms_norm_in_the_backends_own_order_gives_other_bits_somewhere():
    def variants(width: int) -> int:
        x = np.random.default_rng(width).standard_normal((256, width), np.float32)
        return len({bits(norm(x[:rows], np.ones(width, np.float32), summed_by=native_sum))[:1].tobytes() for rows in ROWS})

    assert any(variants(width) > 1 for width in (1000, 2048, 688, 257, 256, 96, 64))


@partial(jax.jit, static_argnames=("theta",))
def rotate(x, positions, theta=1e4):
    return apply_rope(x, rope_rotation(positions, rope_frequencies(x.shape[-1], theta)))


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 1e4), (16, 1e4), (64, 5e5)])
def test_apply_rope_equals_float64(head_dim, theta):
    """Half-split layout: component i turns with component i + H/2 by the angle position * theta**(-2i/H)."""
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((6, 3, head_dim), np.float32)
    positions = np.asarray([0, 1, 2, 17, 300, 2047], np.int32)
    got = rotate(x, positions, theta)
    angle = positions[:, None, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    exact = np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )
    # Angles go up to 2047 in float32 with frequencies good to 2**-23: off by at most 2047 * 2**-22 = 5e-4; times |x| <= 4.
    np.testing.assert_allclose(got[:3], exact[:3], rtol=0, atol=4e-6)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-3)


def test_apply_rope_at_position_zero_changes_no_bit():
    x = np.random.default_rng(0).standard_normal((4, 2, 16), np.float32)
    assert (bits(rotate(x, np.zeros(4, np.int32))) == bits(x)).all()


def test_apply_rope_keeps_scores_of_equal_distances():
    """q at p against k at p - 3 is the same product for every p: that is what the rotation is for."""
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((1, 1, 16), np.float32) for _ in range(2))

    def score(p: int, distance: int) -> float:
        turned = [np.asarray(rotate(x, np.asarray([at], np.int32))) for x, at in ((q, p), (k, p - distance))]
        return float((turned[0] * turned[1]).sum())

    # Sums of 16 products of size 1, angles up to 100: 100 * 2**-22 each.
    assert all(abs(score(p, 3) - score(3, 3)) < 4e-4 for p in (4, 10, 100))
    assert abs(score(10, 3) - score(10, 4)) > 1e-2


def test_rotated_row_beside_any_number_of_rows_gives_the_same_bits():
    x = np.random.default_rng(2).standard_normal((256, 4, 16), np.float32)
    positions = np.arange(256, dtype=np.int32)[::-1].copy()
    assert len({bits(rotate(x[:rows], positions[:rows]))[:1].tobytes() for rows in ROWS}) == 1
