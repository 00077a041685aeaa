"""Rows and pages that kernels in C move: where they should lie, and nothing else changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.ops import moves


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("slot_axis", [2, 3])
def test_append_writes_donated_pages_in_place_and_ends_heads_in_zeros(slot_axis, dtype):
    K, H, page = 2, 16, 16
    pages = jnp.full((3, K, page, H) if slot_axis == 2 else (3, K, H, page), 7, dtype)
    new = jnp.arange(2 * K * 5, dtype=jnp.float32).reshape(2, K, 5)
    address = pages.unsafe_buffer_pointer()
    write = jax.jit(moves.append, static_argnames="slot_axis", donate_argnums=0)
    written = write(pages, new, jnp.asarray([2, 1], jnp.int32), jnp.asarray([3, 15], jnp.int32), slot_axis=slot_axis)
    assert written.unsafe_buffer_pointer() == address
    expected = np.full((3, K, page, H), 7, np.float32)
    for row, (page_id, slot) in enumerate([(2, 3), (1, 15)]):
        expected[page_id, :, slot] = np.pad(np.asarray(new[row]), ((0, 0), (0, H - 5)))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(written, np.float32), slot_axis, 2), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_pages_are_copied_in_place_over_others(dtype):
    pages = jnp.arange(5 * 2 * 16, dtype=jnp.float32).reshape(5, 2, 16).astype(dtype)
    before, address = np.asarray(pages).copy(), pages.unsafe_buffer_pointer()
    source, target = jnp.asarray([1, 0, 1], jnp.int32), jnp.asarray([3, 0, 4], jnp.int32)
    copied = jax.jit(moves.copy_pages, donate_argnums=0)(pages, source, target)
    assert copied.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(copied), before[[0, 1, 2, 1, 1]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_taken_and_places_outside_of_the_table_are_its_nearest(dtype):
    table = jnp.arange(6 * 5, dtype=jnp.float32).reshape(6, 5).astype(dtype)
    taken = jax.jit(moves.take)(table, jnp.asarray([5, 0, 3, 3, -1, 6], jnp.int32))
    np.testing.assert_array_equal(np.asarray(taken), np.asarray(table)[[5, 0, 3, 3, 0, 5]])
