"""The paged cache: page-table arithmetic, sizes, and writing in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import SCRATCH_PAGE, append, cache_bytes, init_cache
from detspec.schedule import Numerics
from tests.fakes import TABLE_CFG


def make_cache(max_requests=3, max_len=10, page=4, implementation="reference"):
    return init_cache(
        TABLE_CFG, max_requests=max_requests, max_len=max_len, numerics=Numerics(page=page, implementation=implementation)
    )


@pytest.mark.parametrize(
    ("implementation", "keys", "values"),
    [
        ("reference", (10, 1, 2, 4), (10, 1, 4, 2)),
        ("pallas_tpu", (10, 1, 4, 128), (10, 1, 4, 128)),
        ("pallas_gpu", (10, 1, 4, 64), (10, 1, 4, 64)),
    ],
)
def test_init_cache_hands_every_page_but_the_scratch_page_to_one_row(implementation, keys, values):
    cache = make_cache(implementation=implementation)
    assert cache.page_table.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert SCRATCH_PAGE == 0
    assert cache.pools[0].k.shape == keys
    assert cache.pools[0].v.shape == values
    assert len(cache.pools) == TABLE_CFG.num_layers
    assert cache.length.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("max_len", "page", "rounded"), [(10, 4, 12), (12, 4, 12), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_init_cache_rounds_rows_up_to_whole_pages(max_len, page, rounded):
    cache = make_cache(max_len=max_len, page=page)
    assert cache.page_table.shape[1] * page == rounded


@pytest.mark.parametrize(
    ("dtype", "implementation"), [("float32", "reference"), ("bfloat16", "pallas_tpu"), ("int8", "reference"), ("int8", "cpu")]
)
def test_cache_bytes_are_those_of_the_pools(dtype, implementation):
    numerics = Numerics(page=4, cache_dtype=dtype, implementation=implementation)
    sizes = {"max_requests": 3, "max_len": 10, "numerics": numerics}
    cache = init_cache(TABLE_CFG, **sizes)
    assert cache_bytes(TABLE_CFG, **sizes) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools))


def keys(num_pages, K, page, H, dtype=jnp.float32):
    """Empty pages of keys, how to write to them, and the axis of their slots brought to the place it has among values."""
    return jnp.zeros((num_pages, K, H, page), dtype), partial(append, slot_axis=3), lambda pages: np.array(pages).swapaxes(2, 3)


def values(num_pages, K, page, H, dtype=jnp.float32):
    return jnp.zeros((num_pages, K, page, H), dtype), append, np.array


@pytest.mark.parametrize("make", [keys, values])
def test_append_writes_position_5_of_pages_3_and_1_to_slot_1_of_page_1(make):
    """Page 4, a row with pages [3 1]: position 5 lies in page_table[5 // 4] = 1 at slot 5 % 4 = 1, position 2 in page 3."""
    table, positions = np.asarray([3, 1]), np.asarray([5, 2])
    pages, append, slots_third = make(num_pages=4, K=2, page=4, H=3)
    new = jnp.arange(1, 13, dtype=jnp.float32).reshape(2, 2, 3)
    written = slots_third(append(pages, new, jnp.asarray(table[positions // 4]), jnp.asarray(positions % 4)))
    assert (written[1, :, 1] == new[0]).all()
    assert (written[3, :, 2] == new[1]).all()
    written[1, :, 1] = written[3, :, 2] = 0
    assert (written == 0).all()


@pytest.mark.parametrize("make", [keys, values])
def test_append_to_wider_pages_ends_heads_in_zeros(make):
    pages, append, slots_third = make(num_pages=2, K=2, page=4, H=5)
    written = slots_third(append(pages + 7, jnp.ones((1, 2, 3)), jnp.asarray([1]), jnp.asarray([2])))
    assert written[1, :, 2].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert (written == 7).sum() == written.size - 10


@pytest.mark.parametrize("make", [keys, values])
def test_append_rounds_to_the_dtype_of_the_pages(make):
    pages, append, slots_third = make(num_pages=2, K=1, page=4, H=2, dtype=jnp.bfloat16)
    written = append(pages, jnp.full((1, 1, 2), 1.003, jnp.float32), jnp.asarray([1]), jnp.asarray([0]))
    assert written.dtype == jnp.bfloat16
    assert (slots_third(written)[1, 0, 0] == jnp.bfloat16(1.0)).all()  # the next bfloat16 is 1.0078


@pytest.mark.parametrize("make", [keys, values])
def test_append_to_donated_pages_writes_in_place(make):
    pages, append, _ = make(num_pages=4, K=1, page=4, H=2)
    address = pages.unsafe_buffer_pointer()
    index = jnp.asarray([1])
    written = jax.jit(append, donate_argnums=0)(pages, jnp.ones((1, 1, 2)), index, index)
    assert written.unsafe_buffer_pointer() == address
    kept = jax.jit(append)(written, jnp.ones((1, 1, 2)), index, index)
    assert kept.unsafe_buffer_pointer() != address
