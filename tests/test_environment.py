"""Which schedule a device gets, and what it refuses to run."""

import dataclasses

import pytest

import detspec as ds
from detspec.environment import chosen_schedule, default_schedule, fingerprint, schedule_for, widens
from detspec.errors import InputError
from detspec.held import HELD
from detspec.model.dense import with_fields
from detspec.presets import preset
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import TABLE_CFG, table_model


@pytest.mark.parametrize(
    ("platform", "kind", "blocks"),
    [
        ("tpu", "TPU v4", (2, 2)),
        ("tpu", "TPU v5 lite", (2, 1)),
        ("tpu", "TPU v5", (2, 2)),
        ("tpu", "TPU v6 lite", (2, 1)),
        ("tpu", "TPU7x", (2, 1)),
        ("tpu", "TPU v9", (1, 1)),
        ("gpu", "NVIDIA H100 80GB HBM3", (1, 16)),
        ("gpu", "NVIDIA H200", (1, 16)),
    ],
)
def test_schedule_of_a_device_with_kernels_names_them_and_its_frozen_blocks(platform, kind, blocks):
    schedule = schedule_for(platform, kind, "9.0" if platform == "gpu" else "")
    assert schedule.numerics.implementation == f"pallas_{platform}"
    assert (schedule.numerics.block_pages, schedule.numerics.num_splits) == (
        1,
        1,
    )  # a canonical pass: page by page, never split
    fast = schedule.fast(1)
    assert (fast.numerics.block_pages, fast.numerics.num_splits, fast.numerics.query_tile) == (*blocks, 1)


@pytest.mark.parametrize(("kind", "capability"), [("Tesla T4", "7.5"), ("NVIDIA A100", "8.0"), ("NVIDIA B200", "10.0")])
def test_schedule_of_a_gpu_without_kernels_is_the_reference_with_one_warning(kind, capability):
    with pytest.warns(
        UserWarning, match=f"Hopper.*{kind} has {capability}. It runs the reference .* from being tuned$"
    ) as warned:
        schedule = schedule_for("gpu", kind, capability)
    assert len(warned) == 1
    assert (schedule.numerics.implementation, schedule.numerics.linear) == ("reference", "xla")
    assert schedule_for("gpu", kind, capability, warns=False) == schedule


@pytest.mark.parametrize(
    ("capability", "dtype", "cache_dtype", "says"),
    [
        ("7.5", "bfloat16", "bfloat16", True),
        ("7.5", "float16", "float16", False),
        ("7.5", "float32", "float32", False),
        ("8.0", "bfloat16", "bfloat16", False),
        ("8.9", "float16", "bfloat16", False),
    ],
)
def test_schedule_of_a_gpu_without_bfloat16_keeps_the_dtype_and_names_float16(capability, dtype, cache_dtype, says):
    with pytest.warns(UserWarning, match="Hopper") as warned:
        schedule = schedule_for("gpu", "a GPU", capability, dataclasses.replace(TABLE_CFG, dtype=dtype))
    assert [("convert --dtype float16" in str(warning.message)) for warning in warned] == [says]
    assert schedule.numerics.cache_dtype == cache_dtype


def test_weights_that_are_rounded_or_can_be_multiplied_are_not_widened():
    assert "no arithmetic in bfloat16" in widens("7.5", dataclasses.replace(TABLE_CFG, dtype="bfloat16"))
    assert widens("7.5", dataclasses.replace(TABLE_CFG, dtype="bfloat16", weights="int8")) == ""
    assert widens("8.0", dataclasses.replace(TABLE_CFG, dtype="bfloat16")) == ""


def test_schedule_of_a_hopper_gpu_has_shorter_pages_for_wide_heads():
    assert schedule_for("gpu", "NVIDIA H200", "9.0", preset("gemma3_4b")).numerics.page == 64
    assert schedule_for("gpu", "NVIDIA H200", "9.0", preset("qwen3_8b")).numerics.page == 128
    assert schedule_for("tpu", "TPU v5 lite", "", preset("gemma3_4b")).numerics.page == 128


def test_schedule_of_a_hopper_gpu_has_shorter_tiles_for_many_heads_of_a_kv_head():
    """128 rows: 16 positions of 8 heads, 8 of 12 (96 rows, not 192), 8 of 16, 1 of 100."""
    for heads, tile in ((8, 16), (12, 8), (16, 8), (100, 1)):
        cfg = with_fields(TABLE_CFG, num_heads=heads)
        assert schedule_for("gpu", "NVIDIA H200", "9.0", cfg).numerics.query_tile == tile
        assert schedule_for("tpu", "TPU v5 lite", "", cfg).numerics.query_tile == 16


@pytest.mark.parametrize(("dtype", "linear"), [("bfloat16", "pinned"), ("float16", "pinned"), ("float32", "xla")])
def test_schedule_of_a_hopper_gpu_has_the_products_that_its_kernel_has(dtype, linear):
    schedule = schedule_for("gpu", "NVIDIA H200", "9.0", dataclasses.replace(TABLE_CFG, dtype=dtype))
    assert (schedule.numerics.linear, schedule.fast(1).numerics.linear) == (linear, linear)


def test_pinned_products_of_a_gpu_are_refused_for_weights_in_float32():
    schedule = Schedule(Numerics(implementation="pallas_gpu", linear="pinned", interpret=True))
    cfgs = {dtype: dataclasses.replace(TABLE_CFG, dtype=dtype) for dtype in ("float32", "bfloat16")}
    assert chosen_schedule(schedule, cfgs["bfloat16"]) == schedule
    with pytest.raises(InputError, match="take weights in bfloat16 or float16, and the model has float32"):
        chosen_schedule(schedule, cfgs["float32"])


@pytest.mark.usefixtures("cpu_kernels")
def test_schedule_of_this_process_is_its_devices():
    assert default_schedule() == schedule_for("cpu", "cpu")
    assert default_schedule(TABLE_CFG) == chosen_schedule(None, TABLE_CFG)
    assert default_schedule().numerics.implementation == "cpu"


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_schedule_of_a_cpu_keeps_keys_and_values_in_the_dtype_that_they_are_made_in(dtype):
    assert default_schedule(dataclasses.replace(TABLE_CFG, dtype=dtype)).numerics.cache_dtype == dtype


def test_schedule_of_a_cpu_without_a_compiler_is_the_reference_with_one_warning(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(UserWarning, match="no C compiler was found: install gcc or clang, or name one .* CC") as warned:
        numerics = default_schedule(TABLE_CFG).numerics
    assert len(warned) == 1
    assert (numerics.implementation, numerics.linear, numerics.cache_dtype) == ("reference", "xla", "float32")


@pytest.mark.parametrize(
    ("implementation", "needed"), [("pallas_tpu", "a TPU"), ("pallas_gpu", r"a GPU of compute capability 9.0 \(Hopper\)")]
)
def test_schedule_of_another_device_is_refused_before_anything_runs(implementation, needed):
    schedule = Schedule(Numerics(page=16, implementation=implementation), Budget(8, 4))
    with pytest.raises(InputError, match=f"{implementation}.*needs {needed}, but this process runs on cpu"):
        ds.generate(table_model(), TABLE_CFG, [[1]], ds.SamplingParams(max_tokens=2), schedule=schedule)
    interpreted = schedule.with_numerics(interpret=True)
    assert chosen_schedule(interpreted, TABLE_CFG) == interpreted


class FakeGpu:
    """A device as jax describes a GPU."""

    platform = "gpu"
    device_kind = "NVIDIA H100 80GB HBM3"

    class client:
        platform_version = "PJRT C API\ncuda 13000"


def test_fingerprint_of_a_gpu_names_the_flags_of_its_compiler_and_that_of_a_cpu_does_not(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert "flags" not in fingerprint()
    monkeypatch.setattr("jax.devices", lambda: [FakeGpu()])
    found = fingerprint()
    assert (found["backend"], found["compiler"]) == ("gpu", "PJRT C API cuda 13000")
    assert found["flags"] == "--xla_gpu_autotune_level=0"
    monkeypatch.delenv("XLA_FLAGS")
    assert fingerprint()["flags"] == ""


def test_digest_of_an_engine_names_the_options_that_hold_its_products(monkeypatch):
    """The reference attention stands in for a GPU's."""
    schedule = Schedule(Numerics(page=16), Budget(8, 4))
    model = ds.Model(TABLE_CFG, table_model(), None, (), "")
    engine = ds.Engine(model, ds.EngineConfig(max_requests=1, max_len=32, schedule=schedule))
    assert "options" not in engine.fingerprint()
    machine = {**fingerprint(), "backend": "gpu"}
    monkeypatch.setattr("detspec.engine.engine.fingerprint", lambda: machine)
    assert engine.fingerprint()["options"] == HELD
