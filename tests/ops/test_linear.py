"""Products with weights: every implementation under the one contract, and how XLA's are kept from its path for one row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.ops.linear import pallas_gpu
from detspec.ops.linear.api import biased, linear_fn, linears_fn
from detspec.ops.linear.xla import linear_f32
from detspec.schedule import Numerics
from tests.fakes import bits
from tests.gpu_simulator import simulated_programs_are_compiled_once  # noqa: F401
from tests.ops.linear_contract import LinearContract, PinnedContract, make_problem

pytestmark = pytest.mark.optimised

product = jax.jit(linear_f32)
unpadded = jax.jit(lambda x, weight: jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32))


def pinned(implementation: str) -> Numerics:
    return Numerics(linear="pinned", implementation=implementation, interpret=implementation != "reference")


class TestXla(LinearContract):
    numerics = Numerics()


class TestReference(PinnedContract):
    numerics = pinned("reference")


def added_in_order(x: np.ndarray, weight: np.ndarray, segment: int) -> np.ndarray:
    """The product `[rows, out]` with one multiply-add after the other; float64 holds a product of two float32 exactly."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], segment):
        found = np.zeros_like(total)
        for i in range(first, min(first + segment, x.shape[1])):
            found = (np.outer(x[:, i].astype(np.float64), weight[:, i].astype(np.float64)) + found).astype(np.float32)
        total = total + found
    return total


class TestCpu(PinnedContract):
    """Few outputs, and inputs that fill no vector; many rows, and products that several threads share."""

    numerics = Numerics(linear="pinned", implementation="cpu")
    dtypes = ("float32", "bfloat16", "float16")
    sizes = ((96, 211), (33, 5), (1, 1), (2200, 40))

    @pytest.mark.parametrize("rows", [1, 3, 8, 70])
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_inputs_are_added_up_one_after_the_other_and_so_are_segments(self, dtype: str, rows: int):
        x, weight = make_problem(2200, 40, dtype, rows=rows)
        got = self.run(x, weight)
        segment = 2048 // x.itemsize
        assert (bits(got) == bits(added_in_order(x, weight, segment))).all()
        assert (bits(got) != bits(added_in_order(x, weight, 2 * segment))).any()  # the control: another order is found out

    def test_several_weights_at_once_have_the_bits_of_one_after_the_other(self):
        x, weight = make_problem(96, 211, "bfloat16", rows=9)
        weights = weight, weight[:64], weight[::-1]
        together = jax.jit(linears_fn(self.numerics))(x, *weights)
        assert all((bits(y) == bits(self.run(x, w))).all() for y, w in zip(together, weights, strict=True))

    def test_rows_that_are_not_used_are_zeros_and_not_read(self):
        x, weight = make_problem(96, 211, "bfloat16", rows=9)
        used = np.arange(9) != 4
        x[4] = np.nan
        got = np.asarray(linears_fn(self.numerics, used)(x, weight)[0])
        assert (got[4] == 0).all()
        assert (got[used] != 0).all()

    def test_numbers_of_float16_below_its_normal_ones_and_above_its_largest_are_kept(self):
        x = np.asarray([[2**-24, 2**-15, 65504, np.inf, -np.inf, np.nan, -(2**-20), 1]], np.float16)
        got = self.run(x.T, np.ones((1, 1), np.float16))
        np.testing.assert_array_equal(got, x.T.astype(np.float32))


@pytest.mark.kernels
class TestPallasTpu(PinnedContract):
    """In the interpreter, where what is not written yet is nan: no edge of a block may reach a sum."""

    numerics = pinned("pallas_tpu")
    spans = ((7, 8), (40, 300))

    def cases(self) -> list[tuple[int, int, str]]:
        """A cut block of inputs, three blocks of float32 and two of bfloat16, the last of them cut."""
        return [(96, 211, "float32"), (1152, 40, "float32"), (1152, 40, "bfloat16")]

    def test_product_of_float16_is_refused(self):
        with pytest.raises(InputError, match='"pallas_tpu" products must be bfloat16 or float32, got float16'):
            linear_fn(self.numerics)(jnp.zeros((3, 64), jnp.float16), jnp.zeros((32, 64), jnp.float16))


@pytest.mark.kernels
class TestPallasGpu(PinnedContract):
    """In the simulator, with one part of the inputs, and with parts of unequal length; outputs that fill no swizzle."""

    numerics = pinned("pallas_gpu")
    rows = 256
    spans = ((0, 1), (7, 40), (63, 128), (64, 256))

    def cases(self) -> list[tuple[int, int, str]]:
        return [(40, 80, "float16"), (320, 144, "bfloat16")]

    def test_product_of_no_row_is_empty(self):
        x, weight = make_problem(64, 64, "bfloat16", rows=1)
        assert linear_fn(self.numerics)(x[:0], weight).shape == (0, 64)

    def test_several_weights_at_once_have_the_bits_of_one_after_the_other(self):
        x, weight = make_problem(320, 192, "bfloat16", rows=9)
        weights = weight, weight[:130], weight[::-1]
        together = linears_fn(self.numerics)(x, *weights)
        assert all((bits(y) == bits(self.run(x, w))).all() for y, w in zip(together, weights, strict=True))

    def test_parts_in_one_thread_block_or_in_several_are_the_same_sums(self, monkeypatch):
        """Chips that share the outputs of a weight make its parts in several thread blocks, one chip in one."""
        x, weight = make_problem(320, 192, "bfloat16", rows=70)
        cut = self.run(x, weight)
        monkeypatch.setattr(pallas_gpu, "PROCESSORS", 1)  # it makes all blocks of outputs, too
        jax.clear_caches()
        whole = self.run(x, weight)
        monkeypatch.setattr(pallas_gpu, "PARTS", 2)
        jax.clear_caches()
        other = self.run(x, weight)
        monkeypatch.undo()
        jax.clear_caches()
        assert (bits(whole) == bits(cut)).all()
        assert (bits(other) != bits(cut)).any()

    def test_product_of_float32_is_refused(self):
        with pytest.raises(InputError, match='"pallas_gpu" products must be bfloat16 or float16, got float32'):
            linear_fn(self.numerics)(jnp.zeros((3, 64), jnp.float32), jnp.zeros((32, 64), jnp.float32))


def test_bias_is_added_in_float32_and_rounded_once():
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((5, 96), (32, 96), (32,)))
    y_f32 = np.asarray(product(x, weight))
    without, found = (np.asarray(biased(product(x, weight), added, x.dtype)) for added in (None, bias))
    assert (without == y_f32.astype(jnp.bfloat16)).all()
    assert (found == (y_f32 + bias.astype(np.float32)).astype(jnp.bfloat16)).all()
    rounded_twice = y_f32.astype(jnp.bfloat16) + bias
    assert (found != rounded_twice).any()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_of_few_rows_equals_that_of_the_rows_it_is_padded_to(dtype, rows):
    rng = np.random.default_rng(rows)
    x, weight = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((4, 64), (96, 64)))
    assert (bits(product(x[:rows], weight)) == bits(product(x, weight))[:rows]).all()
    assert (bits(product(x[:rows, None], weight))[:, 0] == bits(product(x, weight))[:rows]).all()


def test_linear_of_one_bfloat16_row_equals_that_of_many_on_this_cpu():
    """Certified by device, not promised: on the CPU the bits of a bfloat16 product have not depended on 1 to 64 rows."""
    rng = np.random.default_rng(5)
    x, weight = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((64, 64), (96, 64)))
    assert len({bits(product(x[:rows], weight))[:1].tobytes() for rows in (1, 2, 4, 8, 16, 32, 64)}) == 1


def test_product_of_one_row_left_unpadded_gives_other_bits_somewhere():
    """Why `linear` pads: XLA:CPU has another code path for one row."""

    def variants(width: int, dtype: str) -> int:
        rng = np.random.default_rng(width)
        x, weight = (rng.standard_normal((rows, width)).astype(jnp.dtype(dtype)) for rows in (64, 96))
        return len({bits(unpadded(x[:rows], weight))[:1].tobytes() for rows in (1, 4, 64)})

    assert any(variants(width, dtype) > 1 for width in (64, 256, 1024) for dtype in ("float32", "bfloat16"))
