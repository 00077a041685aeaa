"""Canonical programs for GPUs hold XLA's products still: read in programs compiled for an A100, an L4, a T4 and an H100."""

import jax
import jax.numpy as jnp
import pytest
import test_notebooks
from held_products import Held, held_products, library_products
from jax.sharding import SingleDeviceSharding

from detspec.held import HELD
from detspec.ops.linear.xla import linear_f32
from detspec.target_compilers import compile_for, device_of
from detspec.targets import target

WITH_TILES = ("a100", "l4", "h100")
ROWS = (1, 4, 16, 32, 64, 256)
PROGRAMS = ("replay", "none", "none of 256 rows")
ORDER = Held(is_cut=False, block=64, tile=("64", "64"), num_warps=4, num_buffers=3)


def product(name: str, rows: int, *, options: dict[str, object], dtype: str = "bfloat16") -> str:
    """Optimised HLO of one product."""
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((rows, 4096), (4096, 4096)))
    return compile_for(target(name), linear_f32, x, weight, options=options).hlo


@pytest.mark.parametrize("name", WITH_TILES)
def test_products_of_all_numbers_of_rows_are_summed_in_one_order(name: str):
    found = [held_products(product(name, rows, options=dict(HELD))) for rows in ROWS]
    assert found == [[ORDER]] * len(ROWS)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_products_of_other_dtypes_are_summed_in_the_same_order(dtype: str):
    """Three buffers of float32 just fit into the shared memory of an L4."""
    assert held_products(product("l4", 32, options=dict(HELD), dtype=dtype)) == [ORDER]


def test_products_without_options_are_cut_by_their_number_of_rows():
    (few,), (many,) = (held_products(product("a100", rows, options={})) for rows in (32, 256))
    assert few.is_cut
    assert not many.is_cut
    assert few != ORDER != many


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_library_of_a_t4_has_no_tuned_algorithm_and_no_memory_for_parts(dtype: str):
    (held,) = library_products(product("t4", 32, options=dict(HELD), dtype=dtype))
    (left,) = library_products(product("t4", 32, options={}, dtype=dtype))
    assert '"selected_algorithm"' not in held.attributes
    assert '"autotune_workspace_size":"0"' in held.attributes
    assert '"selected_algorithm"' in left.attributes
    # Without arithmetic in bfloat16, both operands are widened first; operands in float16 stay.
    assert [operand.startswith("wrapped_convert") for operand in held.operands] == [dtype == "bfloat16"] * 2


@pytest.mark.slow
def test_prefill_replay_and_segments_have_the_same_products():
    """Prefill runs the program of replays, see `Device.may_prefill_apart`."""
    device = target("l4")
    found = []
    for name in PROGRAMS:
        program = {**test_notebooks.FIRST, **test_notebooks.MORE}[name].make(device)
        found.append(held_products(program.lower(SingleDeviceSharding(device_of(device))).compile().as_text()))
    assert found == [[ORDER] * 7] * len(PROGRAMS)  # four of the layer, two of attention, the logits
