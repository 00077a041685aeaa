"""Attention over a paged cache: every implementation under the one contract."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import Int8Pages
from detspec.errors import InputError
from detspec.ops.attention.api import paged_attention
from detspec.ops.attention.scores import Scores
from detspec.schedule import Numerics
from tests.fakes import bits
from tests.ops.attention_contract import AttentionContract

pytestmark = pytest.mark.optimised


class TestReference(AttentionContract):
    implementation = "reference"


class TestReferenceInInt8(AttentionContract):
    implementation = "reference"
    dtype = "int8"


class TestCpuInInt8(AttentionContract):
    implementation = "cpu"
    dtype = "int8"
    splits = False


class TestCpu(AttentionContract):
    implementation = "cpu"
    splits = False

    def test_attention_over_pages_that_are_not_what_the_schedule_says_is_refused(self):
        numerics = Numerics(page=16, implementation="cpu", cache_dtype="int8")
        k, v = jnp.zeros((2, 1, 16, 16), jnp.int8), jnp.zeros((2, 1, 16, 16), jnp.int8)
        q, integers = jnp.zeros((1, 1, 1, 16)), jnp.zeros((1, 1), jnp.int32)
        refused = partial(paged_attention, q, page_tables=integers, positions=integers, scores=Scores(1.0))
        with pytest.raises(
            InputError, match=r"must be Int8Pages for Numerics\.cache_dtype 'int8', got ArrayImpl and ArrayImpl"
        ):
            refused(k_pages=k, v_pages=v, numerics=numerics)
        k, v = (Int8Pages(pages, jnp.zeros((2, 1, 8))) for pages in (k, v))
        with pytest.raises(InputError, match=r"the scales of k_pages must have shape \(2, 1, 16\), got \(2, 1, 8\)"):
            refused(k_pages=k, v_pages=v, numerics=numerics)
        with pytest.raises(
            InputError, match=r"must be arrays for Numerics\.cache_dtype 'float32', got Int8Pages and Int8Pages"
        ):
            refused(k_pages=k, v_pages=v, numerics=Numerics(page=16, implementation="cpu"))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_attention_over_a_cache_of_two_bytes_has_the_bits_of_the_same_numbers_in_float32(self, dtype):
        shape = self.shape(G=2, W=5, K=2, Q=3)
        problem = self.problem(shape)
        rounded = problem.replace(**{name: getattr(problem, name).astype(dtype).astype(np.float32) for name in "qkv"})
        got = self.run(rounded, self.numerics(shape, cache_dtype=dtype))
        assert (bits(got) == bits(self.run(rounded, self.numerics(shape)))).all()
        assert (bits(got) != bits(self.run(problem, self.numerics(shape)))).any()

    def test_positions_that_repeat_are_left_out(self):
        """Queries that pad a window take no time, and give zeros; the others keep their bits."""
        shape = self.shape(G=2, W=8, K=1, Q=3)
        problem = self.problem(shape, ends=(20, 30))
        positions = problem.positions.copy()
        positions[1, 5:] = positions[1, 4]
        expected = self.run(problem, self.numerics(shape))
        got = self.run(problem.replace(positions=positions), self.numerics(shape))
        assert (bits(got)[0] == bits(expected)[0]).all()
        assert (bits(got)[1, :5] == bits(expected)[1, :5]).all()
        assert not got[1, 5:].any()
        assert expected[1, 5:].all()

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
