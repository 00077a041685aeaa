"""Layout of weights and pages on chips, and layouts that are refused."""

import dataclasses

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.draft.given import RECORDED
from detspec.draft.source import Drafter
from detspec.engine.compiled import PROGRAMS
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.programs import copy_pages, prefill_sequences, read_sequences, run_segment
from detspec.errors import InputError
from detspec.mesh import fitting_chips, make_mesh, param_shardings, place_of
from detspec.model.dense import with_fields
from detspec.model.params import params_bytes
from detspec.riders.rider import Rider
from detspec.sampling_params import SamplingParams
from tests.fakes import random_model
from tests.mesh.conftest import model_on
from tests.mesh.shapes import CFG, engine_on, facts

SMALL = EngineConfig(max_requests=2, max_len=64, compile_cache=False)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_chips", "shape"), [(8, 8, (8, 1)), (2, 2, (2, 1)), (2, 4, (2, 2)), (2, 8, (2, 4)), (1, 4, (1, 4))]
)
def test_kv_heads_are_cut_first_and_copied_where_chips_are_more(num_kv_heads, num_chips, shape):
    mesh = make_mesh(with_fields(CFG, num_kv_heads=num_kv_heads), num_chips)
    assert (mesh.shape["kv"], mesh.shape["query"]) == shape
    assert mesh.devices.ravel().tolist() == jax.devices()[:num_chips]


def test_each_chip_holds_its_share_of_weights_and_of_the_cache():
    cfg = with_fields(CFG, num_kv_heads=8)
    one, eight = (Device(model_on(cfg, num_chips), SMALL) for num_chips in (1, 8))

    def parts(device: Device) -> tuple:
        return device.model.params, device.state.cache.pools

    for whole, shared in zip(parts(one), parts(eight), strict=True):
        own = sum(leaf.addressable_shards[-1].data.nbytes for leaf in jax.tree.leaves(shared))
        assert params_bytes(whole) / 8 <= own <= 1.02 * params_bytes(whole) / 8


def test_numbers_of_chips_that_do_not_divide_the_model_are_refused_with_those_that_do():
    assert fitting_chips(CFG) == [1, 2, 4, 8]
    with pytest.raises(InputError, match=r"3 chips: numbers that divide .* are 1, 2, 4, 8$"):
        make_mesh(CFG, 3)
    with pytest.raises(InputError, match="16 chips were asked for, but jax has 8 cpu devices; JAX_NUM_CPU_DEVICES=16"):
        make_mesh(with_fields(CFG, num_heads=16, num_kv_heads=16, d_ff=96, vocab_size=512), 16)
    with pytest.raises(InputError, match="chips \\(2\\) and sharding were given"):
        ds.load(chips=2, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_layers_with_other_numbers_of_kv_heads_share_them_only_where_each_chip_has_its_own():
    wide, narrow = (with_fields(CFG, num_kv_heads=K).kinds[0] for K in (4, 2))
    assert fitting_chips(dataclasses.replace(CFG, kinds=(narrow, narrow), pattern=(0, 1))) == [1, 2, 4, 8]
    assert fitting_chips(dataclasses.replace(CFG, kinds=(wide, narrow), pattern=(0, 1))) == [1, 2]


def test_loading_on_chips_gives_the_same_weights_and_digest():
    one, four = ds.load(), ds.load(chips=4)
    assert four.digest == one.digest
    assert place_of(four.cfg, four.params).size == 4
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(four.params), strict=True):
        assert np.array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))


def test_weights_that_lie_in_another_way_are_refused():
    mesh = make_mesh(CFG, 2)
    copies = jax.device_put(random_model(CFG), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with pytest.raises(InputError, match=r"weight \['embed'\] lies as .*, but must lie as .*chips=\.\.\."):
        place_of(CFG, copies)
    assert place_of(CFG, jax.device_put(copies, param_shardings(CFG, mesh))) == mesh


def test_what_runs_on_one_chip_alone_says_so():
    model = model_on(CFG, 2)
    for call in (
        lambda: ds.generate(model.params, CFG, [[1, 2]], ds.SamplingParams(max_tokens=2)),
        lambda: ds.score(model.params, CFG, [[1, 2]]),
    ):
        with pytest.raises(InputError, match=r"runs on one chip, but the weights lie on 2: use detspec\.Engine"):
            call()
    with pytest.raises(InputError, match="drafter 'mine' has weights of its own"):
        Device(model, SMALL, drafters={"mine": Drafter(RECORDED._replace(name="mine"), (np.zeros(3),))})
    with pytest.raises(InputError, match="rider 'adapter' works on products, which are cut over 2 chips: use one chip"):
        Device(
            model,
            SMALL,
            riders=(Rider("adapter", lambda cfg, capacity: (), linear=lambda shared, state, product: product.y_f32),),
        )


def test_chips_that_have_no_names_are_one():
    """A user's own `shard_map`, with other axes, is no mesh of ours."""
    from detspec.ops import collectives

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def body(x: jax.Array) -> jax.Array:
        seen.append(collectives.num_chips())
        return collectives.gather(x)

    spec = jax.sharding.PartitionSpec("batch")
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(np.arange(4))
    assert seen == [1]


def num_programs() -> int:
    return sum(len(PROGRAMS.made_from(fn)) for fn in (prefill_sequences, read_sequences, run_segment, copy_pages))


def test_new_weights_go_where_the_old_ones_lie_and_need_no_program():
    """Weights come from jax's own device, free and committed, from another device, and from a mesh."""
    changed = jax.tree.map(lambda leaf: leaf * 2, random_model(CFG))
    mesh = make_mesh(CFG, 2, jax.devices()[4:6])
    given = [changed, *(jax.device_put(changed, device) for device in jax.devices()[:4:3])]
    given.append(jax.device_put(changed, param_shardings(CFG, mesh)))
    asked = [[1, 2, 3]] * 2, SamplingParams(max_tokens=8, ignore_eos=True)
    found = []
    for num_chips, num_replicas in ((1, 1), (4, 1), (1, 2)):
        config = engine_on(model_on(CFG, 1)).config
        engine = Engine(model_on(CFG, num_chips), config, num_replicas=num_replicas)
        answers = [[facts(one) for one in engine.generate(*asked)]]
        count = num_programs()
        for number, params in enumerate(given):
            engine.update_params(params, f"{number}")
            answers.append([facts(one) for one in engine.generate(*asked)])
            assert num_programs() == count, (num_chips, num_replicas, number)
        assert answers[1:] == answers[1:2] * len(given)
        found.append(answers)
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]
