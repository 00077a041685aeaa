"""Configuration values: what is refused, and what they work out."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from detspec.config import ModelConfig, Schedule
from detspec.errors import InputError
from detspec.model.params import param_shapes

SIZES = {
    "vocab_size": 211,
    "d_model": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 96,
}


@pytest.mark.parametrize("field", [*SIZES, "max_position"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None])
def test_model_config_with_a_bad_size_names_field_and_value(field, value):
    with pytest.raises(InputError, match=f"{field} .*{value!r}"):
        ModelConfig(**{**SIZES, field: value})


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
        ModelConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("tied", [True, False])
def test_model_config_counts_the_weights_of_the_pytree(tied):
    cfg = ModelConfig(**SIZES, tie_embeddings=tied)
    assert cfg.num_params == sum(leaf.size for leaf in jax.tree.leaves(param_shapes(cfg)))


def test_model_config_names_dtypes_as_jax_takes_them():
    assert ModelConfig(**SIZES).jax_dtype == jnp.bfloat16
    assert ModelConfig(**SIZES, dtype="float32").jax_dtype == jnp.float32


@pytest.mark.parametrize("field", ["rows", "window", "page", "query_tile", "num_splits"])
@pytest.mark.parametrize("value", [0, -4, 3, 48, 8.0, "8"])
def test_schedule_with_a_size_that_is_no_power_of_two_names_field_and_value(field, value):
    with pytest.raises(InputError, match=f"{field} .*power of two.*{value!r}"):
        Schedule(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("reductions", "fast", "fixed"),
        ("cache_dtype", "int8", "bfloat16"),
        ("alignment", "page", "window"),
        ("implementation", "cuda", "reference"),
    ],
)
def test_schedule_with_an_unknown_name_says_what_is_accepted(field, value, accepted):
    with pytest.raises(InputError, match=f"{field} must be one of .*{accepted}.*{value}"):
        Schedule(**{field: value})


def test_schedule_with_a_window_longer_than_its_rows_is_refused():
    with pytest.raises(InputError, match=r"window \(32\) must not exceed Schedule.rows \(16\)"):
        Schedule(rows=16, window=32)


def test_schedule_budget_changes_rows_and_window_only():
    schedule = Schedule(page=16, alignment="window")
    assert schedule.budget(128, 8) == dataclasses.replace(schedule, rows=128, window=8)
    assert schedule.budget(128, 8).groups == 16


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (33, 64)])
def test_fast_schedule_has_one_row_windows_and_rows_rounded_up(batch, rows):
    fast = Schedule(page=16, alignment="window").fast(batch)
    assert (fast.rows, fast.window, fast.alignment, fast.reductions) == (rows, 1, "free", "native")
    assert fast.page == 16


def test_equal_schedules_are_one_key():
    """Programs are cached by schedule."""
    assert {Schedule(rows=32), Schedule(rows=32)} == {Schedule(rows=32)}
    assert hash(ModelConfig(**SIZES)) == hash(ModelConfig(**SIZES))
