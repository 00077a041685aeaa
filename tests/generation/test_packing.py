"""Packed values come out as they were, and in the places they were meant for."""

import jax
import numpy as np
import pytest

from detspec.errors import InputError
from detspec.generation.init import init_state
from detspec.generation.insert import no_requests, pack, pack_requests, put_requests, unpack
from detspec.riders.rider import Entry
from detspec.sampling_params import SamplingParams
from tests.fakes import RANDOM_CFG
from tests.shelf import TABLE

TREE = {
    "a": np.asarray([[1.5, -0.0, np.nan], [np.inf, 1e-45, 2.0]], np.float32),
    "b": np.asarray([True, False]),
    "c": np.asarray([2**32 - 1, 7], np.uint32),
    "d": np.asarray([[-1], [3]], np.int32),
}


def test_unpacked_arrays_are_bitwise_what_was_packed_and_lie_where_they_were_put():
    packed = pack(TREE, [2, 0], 3)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape[1:]), leaf.dtype), TREE)
    found = jax.device_get(unpack(jax.numpy.asarray(packed), like))
    for name, leaf in TREE.items():
        assert found[name].dtype == leaf.dtype
        assert found[name][[2, 0]].tobytes() == leaf.tobytes()
        assert not found[name][1].any()


@pytest.fixture(scope="module")
def state():
    return init_state(RANDOM_CFG, max_requests=3, max_len=16, max_stop_ids=2, max_logit_bias=2, schedule=TABLE.schedule)


def test_requests_change_the_sequences_they_are_for_and_no_other(state):
    sampling = SamplingParams(temperature=0.5, seed=2**32 - 1, logit_bias={4: 1.0}, deterministic=False, max_tokens=3)
    after = jax.device_get(put_requests(state, pack_requests(state, [Entry(1, [5, 6], sampling)], [9])))
    assert after.live.tolist() == [False, True, False]
    assert after.tokens[1, :3].tolist() == [5, 6, 0]
    assert (after.committed[1], after.limit[1], after.deterministic[1]) == (2, 5, False)
    assert (float(after.sampling.temperature[1]), int(after.sampling.seed[1])) == (0.5, 2**32 - 1)
    assert (after.sampling.bias_ids[1].tolist(), after.sampling.stop_ids[1].tolist()) == ([4, -1], [9, -1])
    before = jax.device_get(state)
    for old, new in zip(jax.tree.leaves(before.sampling), jax.tree.leaves(after.sampling), strict=True):
        assert old[[0, 2]].tobytes() == new[[0, 2]].tobytes()


def test_no_requests_look_to_a_program_like_some_and_change_nothing(state):
    """Otherwise it would be compiled a second time, in the middle of a run."""
    none, some = no_requests(state), pack_requests(state, [Entry(1, [5, 6], SamplingParams())], [9])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), none) == jax.tree.map(lambda x: (x.shape, x.dtype), some)
    after = put_requests(state, none)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), state, after)))


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int16, np.float16])
def test_elements_of_other_sizes_are_refused_by_name(dtype):
    """They would shift what a rider after them gets."""
    with pytest.raises(InputError, match=rf"\['brackets'\] has the dtype {np.dtype(dtype)}: give it another, such as np.int32"):
        pack({"brackets": np.zeros((2, 1), dtype), "turns": np.ones(2, np.int32)}, [0, 1], 2)
