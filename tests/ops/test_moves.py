"""Rows and pages that kernels in C move: where they should lie, and nothing else changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import KV, Int8Pages
from detspec.ops import moves
from detspec.ops.attention import int8_pages
from detspec.ops.attention.api import append_fn
from detspec.schedule import Numerics


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("key_slot_axis", [2, 3])
@pytest.mark.parametrize("places", ["scattered", "following"])
def test_append_writes_donated_pages_in_place_and_what_xla_does(places, key_slot_axis, dtype):
    """Heads of pages end in zeros. Of rows that are not finite, by a nan or an infinity anywhere, nothing else is written."""
    K, H, page, R = 2, 16, 16, {"scattered": 12, "following": 45}[places]
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((R, K, 5)) for _ in range(2))
    k[1, 0, 0], k[2, 1, 4], k[3, 0, 3], v[4, 1, 4], v[5, 0, 2] = np.nan, np.inf, -np.inf, -np.nan, np.inf
    largest = float(jnp.finfo(dtype).max)
    k[6, 0, 1], v[6, 1, 2], k[7], v[8] = largest, -largest, 0, -0.0
    k, v = (jnp.asarray(x, dtype) for x in (k, v))
    where = {"scattered": rng.permutation(3 * page)[:R], "following": np.arange(2, 2 + R)}[places]
    where = jnp.asarray(where, jnp.int32)
    page_ids, slots = where // page, where % page

    def pools() -> KV:
        keys = (3, K, page, H) if key_slot_axis == 2 else (3, K, H, page)
        return KV(jnp.full(keys, 7, dtype), jnp.full((3, K, page, H), 7, dtype))

    implementation = {2: "pallas_gpu", 3: "reference"}[key_slot_axis]
    by_xla = append_fn(Numerics(page=page, implementation=implementation, cache_dtype=str(jnp.dtype(dtype))))
    expected = by_xla(pools(), k, v, page_ids, slots)
    write = jax.jit(moves.append, static_argnames="key_slot_axis", donate_argnums=0)
    mine = pools()
    addresses = [pages.unsafe_buffer_pointer() for pages in mine]
    written = write(mine, k, v, page_ids, slots, key_slot_axis=key_slot_axis)
    assert [pages.unsafe_buffer_pointer() for pages in written] == addresses
    for name, found, other in zip("kv", written, expected, strict=True):
        assert np.asarray(found).tobytes() == np.asarray(other).tobytes(), name
    by_slot = np.asarray(jnp.moveaxis(written.k, key_slot_axis, 2), np.float32)[page_ids, :, slots]
    assert np.isnan(by_slot[1:6, :, :5]).all()
    assert not np.isnan(by_slot[[0, *range(6, R)]]).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("slot_axis", [2, 3])
def test_append_in_int8_writes_in_place_what_xla_rounds_and_a_row_alone(slot_axis, dtype):
    """Rows of all sizes, zeros, too small a row, an infinite one and a nan; the second of 2 heads is never the first's."""
    K, H, page = 2, 16, 16
    rng = np.random.default_rng(0)
    new = rng.standard_normal((7, K, 11)) * 10.0 ** rng.integers(-6, 30, (7, K, 1))
    new[2, 0], new[3, 0], new[4, 0, 3], new[5, 1, 7] = 0, 1e-20, np.inf, np.nan
    new = jnp.asarray(new, dtype)
    shape = (3, K, page, H) if slot_axis == 2 else (3, K, H, page)
    pages = Int8Pages(jnp.full(shape, 7, jnp.int8), jnp.full((3, K, page), 7, jnp.float32))
    page_ids, slots = jnp.asarray([2, 1, 1, 2, 2, 1, 2], jnp.int32), jnp.asarray([3, 15, 0, 1, 2, 3, 9], jnp.int32)
    append = jax.jit(int8_pages.append, static_argnames="slot_axis")

    def slots_third(pages: Int8Pages) -> tuple[np.ndarray, np.ndarray]:
        return np.moveaxis(np.asarray(pages.values), slot_axis, 2), np.asarray(pages.scale)

    together = slots_third(append(pages, new, page_ids, slots, slot_axis=slot_axis))
    alone = slots_third(append(pages, new[6:], page_ids[6:], slots[6:], slot_axis=slot_axis))
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)]
    write = jax.jit(moves.append_int8, static_argnames="slot_axis", donate_argnums=0)
    by_kernel = write(pages, new, page_ids, slots, slot_axis=slot_axis)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(by_kernel)] == addresses
    for got, expected, own in zip(slots_third(by_kernel), together, alone, strict=True):
        assert got.tobytes() == expected.tobytes()
        assert own[2, :, 9].tobytes() == expected[2, :, 9].tobytes()
    values, scale = (held[np.asarray(page_ids), :, np.asarray(slots)] for held in together)
    number = values * scale[..., None]
    finite = [0, 1, 2, 3, 6]
    distance = np.abs(number[..., :11] - np.asarray(new, np.float32))[finite]
    assert (distance <= 0.5001 * scale[finite, :, None] + 2.0**-50).all()
    assert (number[finite, :, 11:] == 0).all()
    assert np.isnan(number[4, 0]).all()
    assert np.isnan(number[5, 1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int8])
def test_pages_are_copied_in_place_over_others(dtype):
    pages = (jnp.arange(5 * 2 * 16, dtype=jnp.float32) % 128).reshape(5, 2, 16).astype(dtype)
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
