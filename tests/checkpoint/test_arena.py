"""Arenas: arrays lie apart in aligned memory that lives as long as they do, and models on a CPU have their weights there."""

import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec as ds
from detspec.checkpoint import arena as arenas
from detspec.checkpoint.arena import ALIGNMENT, HUGE_PAGE, Arena, moved


def test_arrays_lie_apart_in_memory_that_is_freed_with_the_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arenas, "PIECE", 4096)
    monkeypatch.setattr(arenas, "SMALL", 0)
    arena = Arena()
    arrays = [arena.empty((size,), np.dtype(np.float32)) for size in (100, 1, 0, 2000, 17)]  # the fourth has its own piece
    for i, array in enumerate(arrays):
        array[:] = i
    assert [set(array.tolist()) for array in arrays] == [{0}, {1}, set(), {3}, {4}]
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays)
    assert arrays[0].ctypes.data % HUGE_PAGE == 0
    pieces = [weakref.ref(array.base) for array in arrays]
    assert pieces[0]() is pieces[1]()
    assert pieces[0]() is not pieces[3]()
    del array, arrays[0]
    assert pieces[0]() is not None
    arrays.clear()
    assert pieces[0]() is None


def test_small_arrays_keep_no_piece():
    arena = Arena()
    arrays = [arena.empty((size,), np.dtype(np.int8)) for size in (arenas.SMALL, arenas.SMALL - 1, 0)]
    assert arrays[0].base.size > arenas.PIECE
    assert [array.base.size for array in arrays[1:]] == [arenas.SMALL - 1 + ALIGNMENT, ALIGNMENT]
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays)


def test_arrays_that_are_moved_keep_their_bits_and_leave_their_memory():
    first = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    second = jax.device_put(jnp.ones(3, jnp.int8), jax.devices()[0])
    tree = moved({"a": first, "b": (second, first)})
    assert tree["a"] is tree["b"][1]
    assert tree["a"].dtype == jnp.bfloat16
    assert tree["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tree["b"][0].tolist() == [1, 1, 1]
    assert [tree["a"].committed, tree["b"][0].committed] == [False, True]
    assert first.is_deleted()
    assert second.is_deleted()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only devices of a CPU use memory of the host")
@pytest.mark.parametrize("weights", [None, "int8", "integer"])
def test_matrices_of_a_model_on_a_cpu_lie_next_to_each_other(weights):
    """The gaps are at most those of alignment: the matrices of the small model fit into one piece."""
    leaves = jax.tree.leaves(ds.load(weights=weights).params)
    places = sorted((leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in leaves if leaf.nbytes >= arenas.SMALL)
    assert len(places) > 10
    gaps = [begin - (before + size) for (before, size), (begin, _) in itertools.pairwise(places)]
    assert all(0 <= gap < ALIGNMENT for gap in gaps)
