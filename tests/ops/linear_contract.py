"""The contract of products with weights; a test class per implementation inherits it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.ops.linear.api import linear_fn, linears_fn
from detspec.schedule import Numerics
from tests.fakes import bits


@partial(jax.jit, static_argnames=("numerics",))
def product(x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    return linear_fn(numerics)(x, weight)


def make_problem(num_in: int, num_out: int, dtype: str, *, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows `x [rows, in]` and a weight `[out, in]` of normal numbers."""
    rng = np.random.default_rng(seed)
    shapes = (rows, num_in), (num_out, num_in)
    return tuple(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for shape in shapes)


class LinearContract:
    """Inherit, and name the numerics, the dtypes and the sizes `(in, out)` to try."""

    numerics: Numerics
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    sizes: tuple[tuple[int, int], ...] = ((96, 211), (1152, 130), (2200, 40))

    def run(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.asarray(product(x, weight, numerics=self.numerics))

    def cases(self) -> list[tuple[int, int, str]]:
        return [(*size, dtype) for size in self.sizes for dtype in self.dtypes]

    @pytest.mark.programs(30)  # a product for each shape and dtype
    def test_product_is_as_close_to_float64_as_float32_additions_are(self):
        for num_in, num_out, dtype in self.cases():
            x, weight = make_problem(num_in, num_out, dtype, rows=70)
            got = self.run(x, weight)
            sums = np.cumsum(np.asarray(x, np.float64)[:, None] * np.asarray(weight, np.float64), axis=-1)
            exact = sums[..., -1]
            assert (got.shape, got.dtype) == (exact.shape, np.float32)
            # Float32 additions, one after the other, round each of these sums by 0.29 * 2**-23 of the power of two below it.
            # That power is at most the sum, and 0.72 of it in the mean of squares. Sums in another order are of size sqrt(i),
            # too, since numbers are of size 1. So 4 deviations are 5.5 of the real ones: more than the worst of 15000 places.
            squares = np.maximum(np.square(sums).sum(-1), num_in**2 / 2)
            deviation = 0.29 * 2.0**-23 * np.sqrt(squares)
            off = np.abs(got - exact) / deviation
            assert np.sqrt(np.square(off).mean()) <= 0.75, (num_in, num_out, dtype)
            assert off.max() <= 4, (num_in, num_out, dtype)

    def test_product_of_leading_axes_is_that_of_their_rows(self):
        num_in, num_out, dtype = self.cases()[0]
        x, weight = make_problem(num_in, num_out, dtype, rows=6)
        assert (bits(self.run(x.reshape(2, 3, num_in), weight)) == bits(self.run(x, weight)).reshape(2, 3, num_out)).all()


class PinnedContract(LinearContract):
    """For products that are pinned: bits of a row.

    Attributes:
        rows: in all, of several tiles.
        place_step: rows are moved by multiples of it. 1, but for an interpreter whose own products give the rows of one tile
            bits that depend on their place.
        spans: `(first, end)` of the rows that are multiplied without the others.
    """

    rows = 300
    place_step = 1
    spans: tuple[tuple[int, int], ...] = ((0, 1), (7, 8), (31, 33), (0, 64), (40, 300), (299, 300))

    @pytest.mark.programs(80)  # a product for each number of rows
    def test_bits_of_rows_among_any_number_of_others_stay(self):
        for num_in, num_out, dtype in self.cases():
            x, weight = make_problem(num_in, num_out, dtype, rows=self.rows)
            together = bits(self.run(x, weight))
            for first, end in self.spans:
                assert first % self.place_step == 0
                assert (bits(self.run(x[first:end], weight)) == together[first:end]).all(), (num_in, num_out, dtype, first, end)

    def test_bits_beside_other_neighbours_stay(self):
        num_in, num_out, dtype = self.cases()[-1]
        x, weight = make_problem(num_in, num_out, dtype, rows=70)
        mine = slice(65, 68)
        expected = bits(self.run(x, weight))
        for size in (3.0, np.nan):
            other = x * x.dtype.type(size)
            other[mine] = x[mine]
            got = bits(self.run(other, weight))
            assert (got[mine] == expected[mine]).all()
            assert (got[:65] != expected[:65]).any()

    def test_bits_of_rows_that_are_used_stay_and_the_others_are_finite(self):
        num_in, num_out, dtype = self.cases()[0]
        x, weight = make_problem(num_in, num_out, dtype, rows=70)
        weights = weight, weight[:7]
        expected = [bits(self.run(x, each)) for each in weights]
        some = jax.jit(lambda x, used, *weights: linears_fn(self.numerics, used)(x, *weights))
        for used in (np.arange(70) % 3 == 1, np.arange(70) == 69, np.zeros(70, bool), np.ones(70, bool)):
            for got, whole in zip(some(x, used, *weights), expected, strict=True):
                assert (bits(got)[used] == whole[used]).all()
                assert np.isfinite(got).all()

    def test_bits_of_another_order_of_inputs_differ(self):
        """Inverse control: the same sums in two halves, or from the last input to the first, are other bits."""
        num_in, num_out, dtype = self.cases()[-1]
        x, weight = make_problem(num_in, num_out, dtype, rows=4)
        whole, half = self.run(x, weight), num_in // 2
        halves = self.run(x[:, :half], weight[:, :half]) + self.run(x[:, half:], weight[:, half:])
        backwards = self.run(x[:, ::-1], weight[:, ::-1])
        assert (bits(halves) != bits(whole)).any()
        assert (bits(backwards) != bits(whole)).any()
        np.testing.assert_allclose(halves, whole, rtol=0, atol=2 * num_in * 2.0**-24)

    @pytest.mark.parametrize(
        ("x", "weight", "message"),
        [
            ((3, 64), (32, 65), r"weight must be \[out, in\] for x \[..., in\], got weight \(32, 65\) for x \(3, 64\)"),
            ((3, 64), (64,), r"weight must be \[out, in\] for x"),
        ],
    )
    def test_product_of_shapes_that_do_not_fit_is_refused(self, x, weight, message):
        with pytest.raises(InputError, match=message):
            linear_fn(self.numerics)(np.zeros(x, jnp.bfloat16), np.zeros(weight, jnp.bfloat16))

    def test_product_of_two_dtypes_is_refused(self):
        with pytest.raises(InputError, match="x and weight must have one dtype, got bfloat16 and float32"):
            linear_fn(self.numerics)(np.zeros((3, 64), jnp.bfloat16), np.zeros((32, 64), np.float32))
