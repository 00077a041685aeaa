"""Weights in int8, and a cache in int8, on several chips: the bits of one, by gathers and by sums of integers across chips."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from detspec.mesh import make_mesh
from detspec.model.params import quantized
from detspec.ops.collectives import CHIPS
from detspec.ops.linear.api import linear_fn
from detspec.ops.linear.int8 import quantize, scaled_f32, sums
from detspec.sampling_params import SamplingParams
from detspec.schedule import Numerics
from tests.fakes import bits, random_model
from tests.mesh.conftest import model_on
from tests.mesh.shapes import CFG, THINKER_CFG, engine_on, facts, plain_job, schedule_for
from tests.ops.linear_contract import make_problem

INT8 = dataclasses.replace(CFG, weights="int8", tie_embeddings=True)


@pytest.mark.programs(27)  # four models, the weights of three rounded
def test_engine_gives_the_bits_of_one_chip():
    """On four chips, too: see the tests of new weights and of plain sums."""
    found = [plain_job(model_on(INT8, num_chips)) for num_chips in (1, 2, 8)]
    assert found[1:] == found[:1] * 2
    assert found[0] != plain_job(model_on(dataclasses.replace(INT8, weights=None), 1))


def test_engine_with_keys_and_values_in_int8_gives_the_bits_of_one_chip():
    schedule = schedule_for(CFG).with_numerics(cache_dtype="int8")
    one, two = (plain_job(model_on(CFG, num_chips), schedule=schedule) for num_chips in (1, 2))
    assert one == two
    assert one != plain_job(model_on(CFG, 1))


def test_model_that_thinks_has_the_same_thoughts_and_bits_on_two_chips():
    cfg = dataclasses.replace(THINKER_CFG, weights="int8")
    found = plain_job(model_on(cfg, 2))
    assert found == plain_job(model_on(cfg, 1))
    assert any(one[5] for one in found)


def test_new_weights_in_floats_are_rounded_where_the_old_ones_lie():
    full = dataclasses.replace(INT8, weights=None)
    doubled = jax.tree.map(lambda leaf: leaf * 2, random_model(full))
    asked = [[1, 2, 3]], SamplingParams(max_tokens=8)
    engines = engine_on(model_on(INT8, 1)), engine_on(model_on(INT8, 4))
    found = []
    for engine in engines:
        before = engine.generate(*asked)
        engine.update_params(doubled)
        found.append([facts(one) for one in (*before, *engine.generate(*asked))])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert engines[0].model.digest == engines[1].model.digest


def test_weights_are_rounded_on_a_mesh_to_the_bytes_of_one_chip():
    full = dataclasses.replace(INT8, weights=None)
    whole, cut = (quantized(model_on(full, num_chips).params, full) for num_chips in (1, 4))
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), whole, cut)
    assert all(jax.tree.leaves(same))
    assert cut["layers"][0]["q"].values.sharding.spec == cut["layers"][0]["q"].scale.sharding.spec == P(CHIPS)


@pytest.mark.parametrize("num_chips", [2, 4, 8])
def test_sums_of_integers_across_chips_have_the_bits_of_one_and_sums_of_floats_do_not(num_chips):
    """A weight that is cut along its inputs: each chip sums over its part, and `psum` adds the parts in any order."""
    x, weight = make_problem(128, 56, "float32", rows=40)
    rows, rounded = quantize(x), quantize(weight)
    mesh = make_mesh(CFG, num_chips)

    def across_chips(partial_sums, x, weight):
        parts = lambda x, weight: jax.lax.psum(partial_sums(x, weight), CHIPS)  # noqa: E731
        specs = (P(None, CHIPS), P(None, CHIPS))
        return jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))(x, weight)

    one = linear_fn(Numerics())
    added = scaled_f32(across_chips(sums, rows.values, rounded.values), rows.scale, rounded.scale)
    assert (bits(added) == bits(one(x, rounded))).all()
    assert (bits(across_chips(one, x, weight)) != bits(one(x, weight))).any()
