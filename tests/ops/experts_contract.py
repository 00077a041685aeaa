"""The contract of products with the weights of experts; a test class per implementation inherits it."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.ops.experts.api import experts_fn
from detspec.ops.linear.api import linear_fn
from detspec.schedule import Numerics
from tests.fakes import bits


class Size(NamedTuple):
    """Experts, choices of a row, inputs and outputs."""

    num_experts: int
    k: int
    num_in: int
    num_out: int


class Problem(NamedTuple):
    """Rows with their experts, and the weights; `own` has a row for each choice."""

    x: np.ndarray  # [R, in]
    own: np.ndarray  # [R, k, in]
    ids: np.ndarray  # [R, k] int32, different ones in a row
    weight: np.ndarray  # [E, out, in]


@cache
def make_problem(size: Size, dtype: str, *, rows: int) -> Problem:
    """Normal numbers; a row's experts are drawn at random."""
    rng = np.random.default_rng(size.num_in)
    shapes = (rows, size.num_in), (rows, size.k, size.num_in), (size.num_experts, size.num_out, size.num_in)
    x, own, weight = (rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for shape in shapes)
    return Problem(x, own, rng.random((rows, size.num_experts)).argsort(1)[:, : size.k].astype(np.int32), weight)


@partial(jax.jit, static_argnames=("numerics",))
def products(x: jax.Array, ids: jax.Array, *weights: jax.Array, numerics: Numerics) -> tuple[jax.Array, ...]:
    return experts_fn(numerics)(x, ids, *weights)


@partial(jax.jit, static_argnames=("numerics",))
def products_of_used(x: jax.Array, ids: jax.Array, used: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    return experts_fn(numerics, used)(x, ids, weight)[0]


@partial(jax.jit, static_argnames=("numerics",))
def product_with_each(x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    """The products of `x [R, in]` with the matrices of all experts, one by one, `[E, R, out]`."""
    return jnp.stack([linear_fn(numerics)(x, matrix) for matrix in weight])


def chosen(of_experts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Picks from `of_experts [E, R, out]` or `[E, R, k, out]` what `ids [R, k]` name, `[R, k, out]`; zeros for no expert."""
    rows, choices = np.indices(ids.shape)
    there = (ids >= 0) & (ids < len(of_experts))
    at = np.where(there, ids, 0)
    found = of_experts[at, rows] if of_experts.ndim == 3 else of_experts[at, rows, choices]
    return np.where(there[..., None], found, 0)


class ExpertsContract:
    """Inherit, and name the numerics, and the sizes and dtypes to try."""

    numerics: Numerics
    rows = 40
    cases: tuple[tuple[Size, str], ...] = tuple((Size(8, 2, 96, 43), dtype) for dtype in ("float32", "bfloat16"))

    def run(self, x: np.ndarray, ids: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(y_f32) for y_f32 in products(x, ids, *weights, numerics=self.numerics)]

    def problem(self, number: int = 0) -> Problem:
        size, dtype = self.cases[number]
        return make_problem(size, dtype, rows=self.rows)

    @pytest.mark.programs(20)
    def test_products_are_as_close_to_float64_as_any_order_of_sums(self):
        for number in range(len(self.cases)):
            x, own, ids, weight = self.problem(number)
            for rows in (x, own):
                [got] = self.run(rows, ids, weight)
                exact = np.einsum("r...i,eoi->er...o", np.asarray(rows, np.float64), np.asarray(weight, np.float64))
                assert (got.shape, got.dtype) == ((*ids.shape, weight.shape[1]), np.float32)
                # `in` additions of numbers of size 1, one after the other, at the worst of all places.
                np.testing.assert_allclose(got, chosen(exact, ids), rtol=0, atol=4 * x.shape[-1] * 2.0**-24)

    def test_leading_axes_are_those_of_rows(self):
        x, own, ids, weight = self.problem()
        for rows in (x, own):
            [whole] = self.run(rows, ids, weight)
            [got] = self.run(rows.reshape(2, -1, *rows.shape[1:]), ids.reshape(2, -1, ids.shape[1]), weight)
            assert (bits(got) == bits(whole).reshape(got.shape)).all()

    @pytest.mark.parametrize(
        ("x", "ids", "weights", "message"),
        [
            (
                (3, 64),
                (4, 2),
                [(8, 32, 64)],
                r"x must be \[..., in\] or \[..., k, in\] for int32 ids \[..., k\], got x \(3, 64\)",
            ),
            ((3, 5, 64), (3, 2), [(8, 32, 64)], r"got x \(3, 5, 64\) and int32 ids \(3, 2\)"),
            ((3, 64), (3, 2), [(32, 64)], r"weights of experts must be \[E, out, in\] with one E for x"),
            ((3, 64), (3, 2), [(8, 32, 65)], r"got \(8, 32, 65\) for x \(3, 64\)"),
            ((3, 64), (3, 2), [(8, 32, 64), (7, 32, 64)], r"got \(8, 32, 64\), \(7, 32, 64\) for x \(3, 64\)"),
        ],
    )
    def test_shapes_that_do_not_fit_are_refused(self, x, ids, weights, message):
        with pytest.raises(InputError, match=message):
            experts_fn(self.numerics)(
                np.zeros(x, jnp.bfloat16), np.zeros(ids, np.int32), *(np.zeros(shape, jnp.bfloat16) for shape in weights)
            )

    def test_dtypes_that_do_not_fit_are_refused(self):
        x, ids, weight = np.zeros((3, 64), jnp.bfloat16), np.zeros((3, 2), np.int32), np.zeros((8, 32, 64), np.float32)
        with pytest.raises(InputError, match="x and weight must have one dtype, got bfloat16 and float32"):
            experts_fn(self.numerics)(x, ids, weight)
        with pytest.raises(InputError, match=r"for int32 ids \[..., k\], got x \(3, 64\) and float32 ids \(3, 2\)"):
            experts_fn(self.numerics)(x, ids.astype(np.float32), weight.astype(x.dtype))


class PinnedExpertsContract(ExpertsContract):
    """For products that are pinned: their bits are those of `linear_fn` of the same numerics.

    Attributes:
        spans: `(first, end)` of the rows that are multiplied without the others.
    """

    rows = 70
    spans: tuple[tuple[int, int], ...] = ((0, 1), (69, 70), (7, 9), (20, 23), (33, 40), (1, 17), (37, 70), (3, 67))

    def expected(self, number: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Bits of products with the matrix of each expert, `[E, R, out]` of `x` and `[E, R, k, out]` of `own`."""
        x, own, _, weight = self.problem(number)
        together = np.concatenate([x, own.reshape(-1, x.shape[-1])])
        found = bits(np.asarray(product_with_each(together, weight, numerics=self.numerics)))
        return found[:, : self.rows], found[:, self.rows :].reshape(len(weight), *own.shape[:-1], -1)

    @pytest.mark.programs(60)
    def test_bits_are_those_of_one_product_alone_and_in_any_batch(self):
        for number in range(len(self.cases)):
            x, own, ids, weight = self.problem(number)
            of_rows, of_own = self.expected(number)
            for rows, of_experts, spans in ((x, of_rows, self.spans), (own, of_own, self.spans[::3])):
                expected = chosen(of_experts, ids)
                for first, end in ((0, self.rows), *spans):
                    [got] = self.run(rows[first:end], ids[first:end], weight)
                    assert (bits(got) == expected[first:end]).all(), (self.cases[number], first, end)

    def test_bits_in_another_order_of_rows_and_choices_stay(self):
        x, own, ids, weight = self.problem(-1)
        of_rows, of_own = self.expected(-1)
        order = np.random.default_rng(0).permutation(self.rows)
        backwards = ids[order, ::-1]
        assert (bits(self.run(x[order], backwards, weight)[0]) == chosen(of_rows, ids)[order, ::-1]).all()
        assert (bits(self.run(own[order, ::-1], backwards, weight)[0]) == chosen(of_own, ids)[order, ::-1]).all()

    def test_bits_beside_other_neighbours_stay(self):
        x, own, ids, weight = self.problem(-1)
        mine = slice(40, 43)
        for rows, of_experts in zip((x, own), self.expected(-1), strict=True):
            expected = chosen(of_experts, ids)
            for size in (3.0, np.nan):
                others = rows * rows.dtype.type(size)
                others[mine] = rows[mine]
                got = bits(self.run(others, ids, weight)[0])
                assert (got[mine] == expected[mine]).all()
                assert (got[:40] != expected[:40]).any()

    def test_bits_stay_whatever_experts_other_rows_choose(self):
        """All rows choose one expert, most experts are chosen by no row, and ids name no expert: their results are zeros."""
        x, own, ids, weight = self.problem(-1)
        number, k = len(weight), ids.shape[1]
        none = np.where(np.arange(self.rows) % 3 == 0, -1, np.where(np.arange(self.rows) % 3 == 1, number, 2**31 - 1))
        for other in (np.full_like(ids, 5), np.full_like(ids, number - 1), np.repeat(none[:, None], k, 1).astype(np.int32)):
            other[::7] = ids[::7]
            for rows, of_experts in zip((x, own), self.expected(-1), strict=True):
                assert (bits(self.run(rows, other, weight)[0]) == chosen(of_experts, other)).all()

    def test_bits_of_rows_that_are_used_stay_and_the_others_are_finite(self):
        x, own, ids, weight = self.problem()
        for rows, of_experts in zip((x, own), self.expected(), strict=True):
            expected = chosen(of_experts, ids)
            places = np.arange(self.rows)
            for used in (places % 3 == 1, places == self.rows - 1, np.zeros(self.rows, bool), np.ones(self.rows, bool)):
                got = np.asarray(products_of_used(rows, ids, used, weight, numerics=self.numerics))
                assert (bits(got)[used] == expected[used]).all()
                assert np.isfinite(got).all()

    def test_several_weights_at_once_have_the_bits_of_one_after_the_other(self):
        x, own, ids, weight = self.problem(-1)
        weights = weight, weight[:, :16], weight[::-1]
        for rows in (x, own):
            together = self.run(rows, ids, *weights)
            assert all((bits(y) == bits(self.run(rows, ids, each)[0])).all() for y, each in zip(together, weights, strict=True))

    def test_bits_of_another_order_of_inputs_differ(self):
        """Inverse control: the same sums from the last input to the first are other bits."""
        x, _, ids, weight = self.problem(-1)
        [got] = self.run(x, ids, weight)
        [backwards] = self.run(x[:, ::-1], ids, weight[..., ::-1])
        assert (bits(got) != bits(backwards)).any()
        np.testing.assert_allclose(got, backwards, rtol=0, atol=2 * x.shape[-1] * 2.0**-24)
