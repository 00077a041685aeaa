"""Configuration values: what is refused, and what they work out."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from detspec.errors import InputError
from detspec.model.dense import config_from_json, config_to_json, dense_config
from detspec.schedule import Budget, FastPath, Numerics, Schedule
from tests.fakes import FAMILY_CFGS, LAYER_CFGS

SIZES = {"vocab_size": 211, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "d_ff": 96}


@pytest.mark.parametrize("field", [*SIZES, "max_position"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None])
def test_model_config_with_a_bad_size_names_field_and_value(field, value):
    with pytest.raises(InputError, match=f"{field} .*{value!r}"):
        dense_config(**{**SIZES, field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 15}, "head_dim must be even .* 15"),
        ({"dtype": "float64"}, "bfloat16.*float16.*float32.*'float64'"),
    ],
)
def test_model_config_with_values_that_do_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dense_config(**{**SIZES, **changes})


def test_dense_config_refuses_sizes_that_it_would_lose():
    with pytest.raises(TypeError, match=r"takes 7 sizes by position, .*, got 8 values"):
        dense_config(*SIZES.values(), 4096)
    with pytest.raises(TypeError, match="vocab_size by position and by name"):
        dense_config(211, **SIZES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ()}, "pattern must hold numbers of the 0 kinds"),
        ({"kinds": ("attention",)}, "kinds must be a tuple of .*Layer, got .*detspec.dense_config"),
        ({"pattern": [0, 0]}, r"pattern must be a tuple of numbers of kinds, got \[0, 0\]"),
        ({"pattern": (0, True)}, "from 0 on, got True"),
    ],
)
def test_kinds_and_pattern_of_other_types_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(dense_config(**SIZES), **changes)


def test_model_config_names_dtypes_as_jax_takes_them():
    assert dense_config(**SIZES).jax_dtype == jnp.bfloat16
    assert dense_config(**SIZES, dtype="float32").jax_dtype == jnp.float32


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Budget, "window"),
        *((Numerics, field) for field in ("page", "query_tile", "block_pages", "num_splits")),
        *((FastPath, field) for field in ("block_pages", "splits")),
    ],
)
@pytest.mark.parametrize("value", [0, -4, 3, 48, 8.0, "8"])
def test_schedule_with_a_size_that_is_no_power_of_two_names_field_and_value(part, field, value):
    with pytest.raises(InputError, match=f"{part.__name__}.{field} .*power of two.*{value!r}"):
        part(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("reductions", "fast", "fixed"),
        ("cache_dtype", "int4", "int8"),
        ("alignment", "page", "window"),
        ("implementation", "cuda", "reference"),
        ("linear", "cublas", "pinned"),
        ("interpret", "yes", "True"),
    ],
)
def test_schedule_with_an_unknown_name_says_what_is_accepted(field, value, accepted):
    with pytest.raises(InputError, match=f"{field} must be one of .*{accepted}.*{value}"):
        Numerics(**{field: value})


@pytest.mark.parametrize("rows", [0, -16, 8, 24, 16.0, "16"])
def test_schedule_with_rows_that_are_no_whole_windows_is_refused(rows):
    with pytest.raises(InputError, match=rf"rows must be a positive multiple of Budget.window \(16\), got {rows!r}"):
        Schedule(budget=Budget(rows, 16))


def test_schedule_budget_changes_rows_and_window_only():
    schedule = Schedule(Numerics(page=16, alignment="window"))
    assert schedule.with_budget(128, 8) == dataclasses.replace(schedule, budget=Budget(128, 8))
    assert schedule.with_budget(128, 8).budget.groups == 16


@pytest.mark.parametrize(("batch", "splits"), [(1, 4), (2, 2), (3, 1), (4, 1), (33, 1)])
def test_fast_schedule_has_one_row_windows_and_splits_that_its_rows_share(batch, splits):
    fast = Schedule(Numerics(page=16, alignment="window", linear="pinned"), fast_path=FastPath(splits=4)).fast(batch)
    assert fast.budget == Budget(batch, 1)
    assert fast.numerics == Numerics(page=16, query_tile=1, num_splits=splits, reductions="native")


@pytest.mark.parametrize("linear", ["pinned", "xla"])
@pytest.mark.parametrize("implementation", ["cpu", "pallas_gpu"])
def test_fast_schedule_keeps_the_products_of_a_cpu_or_gpu(implementation, linear):
    assert Schedule(Numerics(implementation=implementation, linear=linear)).fast(4).numerics.linear == linear


def test_numerics_for_weights_that_the_gpus_kernel_does_not_take_have_xlas_products():
    """A draft model in float32 next to a model in bfloat16."""
    numerics = Numerics(implementation="pallas_gpu", linear="pinned")
    assert numerics.for_weights("float32") == dataclasses.replace(numerics, linear="xla")
    assert numerics.for_weights("bfloat16") == numerics
    other = dataclasses.replace(numerics, implementation="cpu")
    assert other.for_weights("float32") == other


def test_bits_of_a_schedule_hold_the_window_only_where_windows_are_aligned():
    free, aligned = Schedule(), Schedule(Numerics(alignment="window"))
    assert free.bits() == free.with_budget(64, 4).bits()
    assert free.bits() == dataclasses.replace(free, fast_path=FastPath(2, 4)).bits()
    assert free.bits() != free.with_budget(128, 16).bits()
    assert aligned.bits() != aligned.with_budget(64, 4).bits()
    for schedule in (free, aligned, aligned.with_budget(64, 4)):
        assert Schedule.from_bits(json.loads(json.dumps(schedule.bits()))).bits() == schedule.bits()
    with pytest.raises(InputError, match="not of this version"):
        Schedule.from_bits({"rows": 64, "tiles": 3})


@pytest.mark.parametrize("cfg", [*FAMILY_CFGS.values(), *LAYER_CFGS.values()], ids=[*FAMILY_CFGS, *LAYER_CFGS])
def test_model_config_survives_json(cfg):
    assert config_from_json(json.loads(json.dumps(config_to_json(cfg)))) == cfg
    with pytest.raises(TypeError, match="num_experts"):
        config_from_json({**config_to_json(cfg), "num_experts": 8})


def test_base_of_sliding_layers_survives_json_where_it_equals_that_of_the_others():
    cfg = dense_config(**SIZES, rope_theta=1e4, sliding_window=8, sliding_layers=(True, False), sliding_rope_theta=1e4)
    assert config_to_json(cfg)["sliding_rope_theta"] == 1e4
    assert config_from_json(config_to_json(cfg)) == cfg


def test_equal_schedules_are_one_key():
    """Programs are cached by schedule."""
    assert {Schedule(budget=Budget(rows=32)), Schedule(budget=Budget(rows=32))} == {Schedule(budget=Budget(rows=32))}
    assert hash(dense_config(**SIZES)) == hash(dense_config(**SIZES))
