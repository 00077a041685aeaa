"""The table of targets agrees with the compilers."""

import re

import jax
import jax.numpy as jnp
import pytest

from detspec.roofline import coordinates
from detspec.target_compilers import compile_for, device_of, devices_of
from detspec.targets import GIB, TARGETS, target

TPUS = [name for name in TARGETS if target(name).platform == "tpu"]


@pytest.mark.parametrize("name", TPUS)
def test_tpu_of_the_table_has_the_memory_that_its_compiler_says(name: str):
    too_large = jax.ShapeDtypeStruct((512, GIB // 2), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        compile_for(target(name), lambda x: x + 1, too_large)
    available = float(re.search(r"available HBM \(([\d.]+)G\)", str(error.value))[1])
    assert available - 1 < target(name).usable_bytes / GIB <= available


@pytest.mark.parametrize("name", TARGETS)
def test_device_of_target_is_of_its_kind(name: str):
    assert device_of(target(name)).device_kind == target(name).kind


@pytest.mark.parametrize(("name", "halves"), [("v4:2x2x1", 2), ("v5p:2x2x1", 1), ("tpu7x:2x2x1", 2), ("v5e:2x2", 1)])
def test_device_is_the_part_of_a_chip_that_the_table_says(name: str, halves: int):
    assert len(device_of(target(name)).client.devices()) == 4 * halves
    assert ("half a chip" in target(name).device) == (halves == 2)


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v5p:2x2x2", "v5p:4x4x4", "tpu7x:2x2x1", "tpu7x:2x2x2"])
def test_devices_of_a_slice_lie_where_we_count_them(name: str):
    devices = devices_of(target(name), 1)
    axes = len(name.partition(":")[2].split("x"))
    assert [tuple(device.coords[:axes]) for device in devices] == coordinates(target(name))


def test_gpus_of_a_host_are_as_many_as_asked_for():
    assert len(devices_of(target("h200"), 8)) == 8


def test_compile_for_overwrites_a_donated_argument_and_only_that():
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    kept, donated = (compile_for(target("v5e:2x2"), lambda x: x * 2, x, donate=donate) for donate in ((), (0,)))
    assert (kept.alias_bytes, donated.alias_bytes) == (0, 256 * 128 * 4)
    assert kept.peak_bytes - kept.code_bytes == 2 * 256 * 128 * 4
    assert donated.peak_bytes - donated.code_bytes == 256 * 128 * 4
