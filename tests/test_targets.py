"""The table of targets, the schedules that run on them, and what is said where compilers are missing."""

import dataclasses
import os
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import pytest

from detspec import target_compilers
from detspec.environment import schedule_for
from detspec.errors import InputError
from detspec.presets import preset
from detspec.schedule import Budget, Schedule
from detspec.target_compilers import compile_for, device_of
from detspec.targets import TARGETS, canonical_schedule, target

SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], *, ptxas: bool = False) -> None:
    """As if exactly `versions` were installed, and a CUDA toolkit or none."""

    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(target_compilers, "version", version)
    monkeypatch.setattr(target_compilers.shutil, "which", lambda name: "/usr/bin/ptxas" if ptxas else None)


def test_target_unknown_lists_those_there_are():
    with pytest.raises(InputError, match=r"unknown target 'v6e'; accepted are v4:2x2x1, .*v6e:2x2, .*h200"):
        target("v6e")


def test_target_in_a_slice_of_another_size_is_the_same_device():
    larger = target("v5p:2x2x2")
    assert larger == dataclasses.replace(target("v5p:2x2x1"), name="v5p:2x2x2")


@pytest.mark.parametrize("name", ["v5p:2x2", "v6e:2x", "v6e:0x2", "v6e:2x2x1", "h200:8", "v9:2x2", "v6e:-2x2"])
def test_target_of_another_shape_is_refused(name: str):
    with pytest.raises(InputError, match=f"unknown target '{name}'"):
        target(name)


def test_target_that_is_no_whole_hosts_is_refused():
    with pytest.raises(InputError, match=r"no slice 'v6e:3x4': hosts have 2x2 chips"):
        target("v6e:3x4")


@pytest.mark.parametrize("name", TARGETS)
def test_target_has_plausible_figures(name: str):
    found = target(name)
    assert found.name == name
    assert found.usable_bytes <= found.hbm_bytes
    # Whatever is read from memory can be multiplied with 100 to 1000 rows meanwhile: the balance of accelerators of the time.
    assert 100 < found.flop_per_s / (found.bytes_per_s / 2) / 2 < 1000


def test_canonical_schedule_runs_the_kernels_of_the_platform_on_the_default_budget():
    tpu, gpu = (canonical_schedule(target(name)) for name in ("v5e:2x2", "h100"))
    assert (tpu.numerics.implementation, gpu.numerics.implementation) == ("pallas_tpu", "pallas_gpu")
    assert (tpu.budget, tpu.numerics.page, gpu.numerics.page) == (Budget(256, 16), 128, 128)
    assert canonical_schedule(target("h100"), preset("gemma3_4b")).numerics.page == 64
    assert canonical_schedule(target("v5e:2x2"), preset("gemma3_4b")).numerics.page == 128
    assert (tpu.fast_path.block_pages, gpu.fast_path.splits) == (2, 16)


@pytest.mark.parametrize("name", ["t4", "l4", "a100"])
def test_canonical_schedule_of_a_gpu_without_kernels_is_the_devices_own_without_a_warning(name: str):
    cfg = dataclasses.replace(preset("qwen3_0_6b"), dtype="float16")
    schedule = canonical_schedule(target(name), cfg)
    assert (schedule.numerics.implementation, schedule.numerics.linear) == ("reference", "xla")
    assert schedule.numerics.cache_dtype == ("float16" if name == "t4" else "bfloat16")
    with pytest.warns(UserWarning, match=target(name).kind):
        assert schedule_for("gpu", target(name).kind, target(name).gpu.capability, cfg) == schedule


def test_thread_blocks_have_the_shared_memory_that_nvidia_says():
    """CUDA C++ Programming Guide: most shared memory of a thread block, by compute capability, in KiB."""
    most = {"7.5": 64, "8.0": 163, "8.9": 99, "9.0": 227}
    gpus = [found for found in TARGETS.values() if found.gpu]
    assert [found.on_chip_bytes / 1024 for found in gpus] == [most[found.gpu.capability] for found in gpus]


@pytest.mark.parametrize(
    ("split", "rows", "window"),
    [({"window": 32}, 256, 32), ({"groups": 2}, 32, 16), ({"window": 8, "groups": 3}, 24, 8), ({"window": 1024}, 1024, 1024)],
)
def test_canonical_schedule_is_cut_as_asked(split: dict[str, int], rows: int, window: int):
    schedule = canonical_schedule(target("v6e:2x2"), **split)
    assert (schedule.budget.rows, schedule.budget.window) == (rows, window)
    assert isinstance(schedule, Schedule)


@pytest.mark.parametrize(
    ("split", "message"), [({"window": 12}, "window.*12"), ({"window": 0}, "window.*0"), ({"groups": 0}, "0")]
)
def test_canonical_schedule_refuses_what_is_no_split(split: dict[str, int], message: str):
    with pytest.raises(InputError, match=message):
        canonical_schedule(target("v6e:2x2"), **split)


def test_compile_for_without_libtpu_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, {"jaxlib": "0.10.2"})
    with pytest.raises(InputError, match=r"TPU needs libtpu, not installed: pip install 'jax\[.*\]>=0.10' 'nvidia-cuda"):
        compile_for(target("v5e:2x2"), lambda x: x, SHAPE)


def test_compile_for_without_the_cuda_plugin_names_every_missing_package(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, {"jaxlib": "0.10.2", "nvidia-nvvm": "13.0"})
    with pytest.raises(InputError, match="jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-cuda-runtime, not"):
        compile_for(target("h100"), lambda x: x, SHAPE)


def test_compile_for_with_a_cuda_toolkit_wants_no_cuda_wheels(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, {"jaxlib": "0.10.2"}, ptxas=True)
    with pytest.raises(InputError, match="GPU needs jax-cuda13-plugin, jax-cuda13-pjrt, not installed"):
        compile_for(target("h100"), lambda x: x, SHAPE)


def test_compile_for_with_a_plugin_of_another_version_says_both(monkeypatch: pytest.MonkeyPatch):
    plugin = dict.fromkeys(("jax-cuda13-plugin", "jax-cuda13-pjrt"), "0.9.0")
    install(monkeypatch, {"jaxlib": "0.10.2", **plugin}, ptxas=True)
    with pytest.raises(InputError, match=r"0\.9\.0, jaxlib 0\.10\.2"):
        compile_for(target("h100"), lambda x: x, SHAPE)


def test_device_of_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch):
    seen = {}

    def get_topology_desc(**_):
        seen.update(os.environ)
        raise NotImplementedError

    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    install(monkeypatch, dict.fromkeys(("jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"), "0.10.2"), ptxas=True)
    monkeypatch.setattr(target_compilers.topologies, "get_topology_desc", get_topology_desc)
    before = dict(os.environ)
    with pytest.raises(InputError, match="JAX_PLATFORMS=cpu"):
        device_of(target("h200"))
    assert dict(os.environ) == before
    assert (seen["TPU_WORKER_HOSTNAMES"], seen["ALLOW_MULTIPLE_LIBTPU_LOAD"]) == ("mine", "1")
