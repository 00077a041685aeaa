"""Products with the weights of experts: every implementation under the one contract, int8, derivatives, and the control."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.ops.experts import pallas_gpu, pallas_tpu
from detspec.ops.experts.api import experts_fn
from detspec.ops.linear import pallas_gpu as linear
from detspec.ops.linear.int8 import QTensor, quantize
from detspec.schedule import Numerics
from tests.fakes import bits
from tests.gpu_simulator import memory_of_nan, simulated_programs_are_compiled_once  # noqa: F401
from tests.ops.experts_contract import (
    ExpertsContract,
    PinnedExpertsContract,
    Size,
    chosen,
    make_problem,
    product_with_each,
    products,
    products_of_used,
)

pytestmark = pytest.mark.optimised


class TestXla(ExpertsContract):
    numerics = Numerics()


class TestReference(PinnedExpertsContract):
    """By pairs up to four rows, by experts above."""

    numerics = Numerics(linear="pinned")


class TestCpu(PinnedExpertsContract):
    """Experts with more rows than a tile or a block has, one row of several experts, and inputs that fill no vector."""

    numerics = Numerics(linear="pinned", implementation="cpu")
    cases = (
        (Size(3, 2, 33, 5), "float32"),
        (Size(64, 8, 64, 43), "float16"),
        (Size(8, 2, 2200, 70), "bfloat16"),
        (Size(8, 2, 96, 211), "bfloat16"),
    )

    def test_rows_that_are_not_used_are_zeros_and_not_read(self):
        x, own, ids, weight = self.problem(-1)
        used = np.arange(self.rows) != 4
        for rows in (x, own):
            rows = np.where((~used).reshape(-1, *(1,) * (rows.ndim - 1)), np.nan, rows).astype(rows.dtype)
            got = np.asarray(products_of_used(rows, ids, used, weight, numerics=self.numerics))
            assert (got[4] == 0).all()
            assert (got[used] != 0).all()


@pytest.mark.slow
@pytest.mark.kernels
class TestPallasTpu(PinnedExpertsContract):
    """In the simulator, from memory full of nan: inputs that fill no block, and several of them; two tiles of an expert."""

    numerics = Numerics(linear="pinned", implementation="pallas_tpu", interpret=True)
    cases = ((Size(8, 2, 96, 211), "float32"), (Size(6, 2, 2200, 40), "bfloat16"))
    spans = ((0, 1), (3, 67))

    def test_bits_in_more_blocks_of_outputs_and_more_parts_of_rows_stay(self, monkeypatch):
        x, own, ids, weight = self.problem()
        expected = [bits(self.run(rows, ids, weight)[0]) for rows in (x, own)]
        monkeypatch.setattr(pallas_tpu, "VMEM_BYTES", 0)
        monkeypatch.setattr(pallas_tpu, "MAX_PAIRS", 100)
        assert pallas_tpu._blocks(50, 100, weight).outputs == 128
        traced_anew = jax.jit(lambda *args: pallas_tpu.experts_f32.__wrapped__(*args, [weight], interpret=True)[0])
        for rows, whole in zip((x, own), expected, strict=True):
            assert (bits(traced_anew(rows, ids)) == whole).all()


@pytest.mark.slow
@pytest.mark.kernels
class TestPallasGpu(PinnedExpertsContract):
    """In the simulator, from memory full of nan: parts of unequal length, outputs that fill no swizzle, several tiles."""

    numerics = Numerics(linear="pinned", implementation="pallas_gpu", interpret=True)
    cases = ((Size(8, 2, 328, 83), "float16"), (Size(6, 2, 320, 144), "bfloat16"))
    spans = ((0, 1), (3, 67))

    def run(self, x: np.ndarray, ids: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
        with memory_of_nan():
            return super().run(x, ids, *weights)

    def test_bits_in_strips_of_a_block_and_with_all_parts_in_one_thread_block_stay(self, monkeypatch):
        x, _, ids, weight = self.problem(-1)
        [expected] = self.run(x, ids, weight)
        monkeypatch.setattr(pallas_gpu, "STRIP", 1)
        monkeypatch.setattr(linear, "PROCESSORS", 1)
        traced_anew = jax.jit(lambda *args: pallas_gpu.experts_f32.__wrapped__(*args, [weight], interpret=True)[0])
        with memory_of_nan():
            assert (bits(traced_anew(x, ids)) == bits(expected)).all()


@pytest.mark.programs(20)
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_bits_of_experts_in_int8_are_those_of_one_product(implementation):
    numerics = Numerics(implementation=implementation)
    x, own, ids, weight = make_problem(Size(8, 2, 96, 43), "bfloat16", rows=40)
    rounded = jax.jit(quantize)(weight)
    each = [QTensor(*leaves) for leaves in zip(rounded.values, rounded.scale, strict=True)]
    together = np.concatenate([x, own.reshape(-1, 96)])
    of_experts = bits(np.asarray(product_with_each(together, each, numerics=numerics)))
    for rows, of_each in ((x, of_experts[:, :40]), (own, of_experts[:, 40:].reshape(8, 40, 2, -1))):
        expected = chosen(of_each, ids)
        for first, end in ((0, 40), (7, 8)):
            got = products(rows[first:end], ids[first:end], rounded, rounded, numerics=numerics)
            assert all((bits(y_f32) == expected[first:end]).all() for y_f32 in got)


def test_products_of_xla_over_rows_by_experts_differ_alone_and_in_a_batch():
    """The control: rows that are sorted by experts and multiplied by XLA, as others do it, have other bits alone."""
    x, _, ids, weight = make_problem(Size(8, 2, 333, 48), "float32", rows=64)

    @jax.jit
    def arranged(x: jax.Array, ids: jax.Array) -> jax.Array:
        order = jnp.argsort(ids.reshape(-1))
        counts = jnp.zeros(8, jnp.int32).at[ids.reshape(-1)].add(1)
        found = jax.lax.ragged_dot(x[order // 2], weight.swapaxes(1, 2), counts, preferred_element_type=jnp.float32)
        return jnp.zeros_like(found).at[order].set(found).reshape(*ids.shape, -1)

    together = bits(arranged(x, ids))
    alone = np.concatenate([bits(arranged(x[row : row + 1], ids[row : row + 1])) for row in range(64)])
    assert (alone != together).any()
    np.testing.assert_allclose(
        arranged(x, ids), products(x, ids, weight, numerics=Numerics())[0], rtol=0, atol=333**1.5 * 2.0**-24
    )


def test_derivatives_are_those_of_a_loop_in_float64():
    x, own, ids, weight = make_problem(Size(8, 2, 96, 43), "float32", rows=40)
    ids = np.where(np.arange(40)[:, None] % 5 == 4, 8, ids).astype(np.int32)
    rng = np.random.default_rng(1)
    cotangent = rng.standard_normal((40, 2, 43)).astype(np.float32)
    for rows in (x, own):
        _, pull_back = jax.vjp(lambda rows, weight: experts_fn(Numerics())(rows, ids, weight)[0], rows, weight)
        of_rows, of_weight = jax.jit(pull_back)(cotangent)
        exact_rows, exact_weight = np.zeros(rows.shape), np.zeros(weight.shape)
        for r, j in zip(*np.nonzero(ids < 8), strict=True):
            at = (r, j) if rows is own else r
            exact_rows[at] += cotangent[r, j].astype(np.float64) @ weight[ids[r, j]]
            exact_weight[ids[r, j]] += np.outer(cotangent[r, j].astype(np.float64), rows[at])
        # Each of up to 96 additions rounds a sum of that many numbers of size 1, so about the root of their number.
        np.testing.assert_allclose(of_rows, exact_rows, rtol=0, atol=96**1.5 * 2.0**-24)
        np.testing.assert_allclose(of_weight, exact_weight, rtol=0, atol=96**1.5 * 2.0**-24)
