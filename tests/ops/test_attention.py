"""Attention over a paged cache: every implementation under the one contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.ops.attention import cpu
from detspec.ops.attention.api import paged_attention
from detspec.ops.attention.scores import Scores
from detspec.schedule import Numerics
from tests.fakes import bits
from tests.ops.attention_contract import AttentionContract


class TestReference(AttentionContract):
    implementation = "reference"


class TestCpu(AttentionContract):
    implementation = "cpu"
    splits = False

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_attention_over_a_cache_of_two_bytes_has_the_bits_of_the_same_numbers_in_float32(self, dtype):
        shape = self.shape(G=2, W=5, K=2, Q=3)
        problem = self.problem(shape)
        rounded = problem.replace(**{name: getattr(problem, name).astype(dtype).astype(np.float32) for name in "qkv"})
        got = self.run(rounded, self.numerics(shape, cache_dtype=dtype))
        assert (bits(got) == bits(self.run(rounded, self.numerics(shape)))).all()
        assert (bits(got) != bits(self.run(problem, self.numerics(shape)))).any()

    def test_keys_that_are_nan_reach_the_tokens_that_attend_to_them_and_no_others(self):
        shape = self.shape(G=1, W=8, K=1, Q=2)
        problem = self.problem(shape, ends=(20,))
        k = problem.k.copy()
        k[problem.page_tables[0, 0], 0, 15] = np.nan
        got = self.run(problem.replace(k=k), self.numerics(shape))
        attends = problem.positions[0] >= 15
        assert np.isnan(got[0, attends]).all()
        assert (bits(got[0, ~attends]) == bits(self.run(problem, self.numerics(shape))[0, ~attends])).all()

    @pytest.mark.parametrize(
        ("page", "head_dim", "changes", "message"),
        [
            (8, 16, {}, "pages of 16 to 512 slots .* got 8 slots"),
            (1024, 16, {}, "got 1024 slots"),
            (16, 528, {}, "heads of at most 512 dimensions, got 16 slots and 528 dimensions"),
            (16, 16, {"num_splits": 2}, "no splits, got Numerics.block_pages 1 and Numerics.num_splits 2"),
        ],
    )
    def test_sizes_that_the_kernel_lacks_are_refused(self, page, head_dim, changes, message):
        numerics = Numerics(page=page, implementation="cpu", **changes)
        k, v = jnp.zeros((2, 1, head_dim, page)), jnp.zeros((2, 1, page, head_dim))
        q, integers = jnp.zeros((1, 1, 1, head_dim)), jnp.zeros((1, 1), jnp.int32)
        with pytest.raises(InputError, match=message):
            paged_attention(q, k, v, integers, integers, scores=Scores(1.0), numerics=numerics)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("slot_axis", [2, 3])
def test_append_writes_donated_pages_in_place_and_ends_heads_in_zeros(slot_axis, dtype):
    K, H, page = 2, 16, 16
    pages = jnp.full((3, K, page, H) if slot_axis == 2 else (3, K, H, page), 7, dtype)
    new = jnp.arange(2 * K * 5, dtype=jnp.float32).reshape(2, K, 5)
    address = pages.unsafe_buffer_pointer()
    write = jax.jit(cpu.append, static_argnames="slot_axis", donate_argnums=0)
    written = write(pages, new, jnp.asarray([2, 1], jnp.int32), jnp.asarray([3, 15], jnp.int32), slot_axis=slot_axis)
    assert written.unsafe_buffer_pointer() == address
    expected = np.full((3, K, page, H), 7, np.float32)
    for row, (page_id, slot) in enumerate([(2, 3), (1, 15)]):
        expected[page_id, :, slot] = np.pad(np.asarray(new[row]), ((0, 0), (0, H - 5)))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(written, np.float32), slot_axis, 2), expected)
