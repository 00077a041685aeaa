"""The comparison of a mesh with one chip finds what differs; results then name the mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from detspec.config import ModelConfig
from detspec.engine.bits import differing_copies
from detspec.engine.certify_mesh import mesh_of_bits
from detspec.engine.device import Device
from detspec.engine.engine_config import EngineConfig
from detspec.errors import DivergenceError
from detspec.model.mlp import GatedMLP
from tests.mesh.conftest import model_on
from tests.mesh.shapes import CFG, engine_on, mlp_added_across_chips, schedule_for

pytestmark = pytest.mark.optimised


def device_on(num_chips: int, cfg: ModelConfig = CFG, **numerics) -> Device:
    schedule = schedule_for(cfg).with_numerics(**numerics)
    return Device(model_on(cfg, num_chips), EngineConfig(max_requests=3, max_len=64, schedule=schedule, compile_cache=False))


def test_chips_that_give_the_bits_of_one_have_its_name():
    assert mesh_of_bits(device_on(1)) == ("any", "")
    assert mesh_of_bits(device_on(1, linear="xla")) == ("1", "")
    assert mesh_of_bits(device_on(4)) == ("any", "")
    one, four = (engine_on(model_on(CFG, num_chips)) for num_chips in (1, 4))
    assert one.fingerprint() == four.fingerprint()


def test_sums_that_are_added_across_chips_are_found_and_named(monkeypatch):
    monkeypatch.setattr(GatedMLP, "rows", mlp_added_across_chips)
    cfg = dataclasses.replace(CFG, dtype="float32")  # rounding to bfloat16 hides most differences

    found = {}
    for num_chips, name in ((2, "kv=2,query=1"), (4, "kv=2,query=2")):
        mesh, found[num_chips] = mesh_of_bits(device_on(num_chips, cfg))
        assert mesh == name
        assert "the mesh has token" in found[num_chips]
    assert found[2] != found[4]
    with pytest.warns(UserWarning, match="on these chips bits are not those of one chip"):
        engine = engine_on(model_on(cfg, 2), max_requests=3, max_len=64)
    assert engine.fingerprint()["mesh"] == "kv=2,query=1"


def test_copies_that_differ_on_one_chip_are_found():
    device = device_on(4)
    same = [np.arange(6, dtype=np.float32)] * 4
    other = [*same[:2], np.where(np.arange(6) == 3, np.float32(3.0000002), same[0]), same[3]]
    sharding = jax.sharding.NamedSharding(device.place, jax.sharding.PartitionSpec())

    def held(shards: list[np.ndarray]) -> jax.Array:
        parts = [jax.device_put(part, chip) for part, chip in zip(shards, device.place.devices.flat, strict=True)]
        return jax.make_array_from_single_device_arrays((6,), sharding, parts)

    assert differing_copies(held(same)) == ""
    device.check_copies(held(same))
    assert ":2 holds other bits than" in differing_copies(held(other))
    with pytest.raises(DivergenceError, match="a chip or a link is at fault"):
        device.check_copies(held(other))
