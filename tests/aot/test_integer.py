"""Programs of integer models have no operation on floats for missing devices either; products are of int8, into int32."""

from collections import Counter

import compile_proof  # noqa: F401  # finds what stages of scripts/prove_on_device.py are made of
import jax
import jax.numpy as jnp
import pytest
from instructions import instructions
from jax.sharding import SingleDeviceSharding
from prove_stages.programs import engine_programs

from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, needed_plans
from detspec.model.dense import dense_config
from detspec.model.to_integer import integer_config
from detspec.ops import integer
from detspec.target_compilers import device_of
from detspec.targets import canonical_schedule, target
from tests.integer.test_program import LOOKS, on_floats

CFG = dense_config(512, 256, 1, 4, 2, 64, 512, qkv_bias=True)
OTHERS = ("v5e:2x2", "tpu7x:2x2x1")
PRODUCTS = {"dot", "convolution"}
KERNEL = "mosaic_gpu"  # of a GPU's products with weights


def compiled(name: str, only: str, bits: int) -> str:
    """Optimised HLO of the steps, or of the replays, of an engine that runs texts of any kind."""
    cfg = integer_config(CFG, bits)
    needs = Needs(deterministic=True, ordinary=False, processing=True)
    schedule = canonical_schedule(target(name), cfg)
    config = EngineConfig(max_requests=8, max_len=256, method="none", schedule=schedule)
    plans = [plan for plan in needed_plans(config, schedule, config.max_requests + 1, needs) if not plan.ordinary]
    widest = max(plans, key=lambda plan: plan.batch)  # for a single row, products are no products of matrices
    program = next(each for each in engine_programs(cfg, config, [widest], name="engine") if only in each.name)
    return program.lower(SingleDeviceSharding(device_of(target(name)))).compile().as_text()


@pytest.mark.parametrize("only", ["run_segment", pytest.param("read_sequences", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("v6e:2x2", 15), ("h100", 15), ("h100", 8)]
    + [pytest.param(*each, marks=pytest.mark.sweep) for each in (("v6e:2x2", 8), *((other, 15) for other in OTHERS))],
)
def test_program_multiplies_int8_alone_and_has_no_operation_on_floats(name: str, bits: int, only: str):
    hlo = compiled(name, only, bits)
    every = list(instructions(hlo))
    by_name = {each.name: each for each in every}
    products = [each for each in every if each.opcode in PRODUCTS or KERNEL in each.attributes]
    # Matrices of the same rows are one product on a GPU: three in a layer, and the head. Attention has two at least.
    assert len(products) >= 6
    kinds = Counter((*(by_name[x].shapes[0].dtype for x in each.operands[:2]), each.shapes[0].dtype) for each in products)
    assert set(kinds) == {("s8", "s8", "s32")}
    assert Counter((each.opcode, each.op_name) for each in on_floats(hlo) if each.opcode not in LOOKS) == Counter()
    assert takers_of_magnitudes(hlo) == {"convert"}


def takers_of_magnitudes(hlo: str) -> set[str]:
    """Operations on magnitudes; of unsigned numbers they begin with a conversion.

    Of `max(x, -x)` and another signed maximum ptxas 13.0 makes one instruction, and loses the minus.
    """
    every = list(instructions(hlo))
    magnitudes = {each.name for each in every if each.opcode == "abs"}
    return {each.opcode for each in every if magnitudes & {*each.operands}}


def test_control_signed_maximum_of_magnitudes_is_found():
    x = jax.ShapeDtypeStruct((64, 96), jnp.int32, sharding=SingleDeviceSharding(device_of(target("h100"))))
    for found, fn in (("reduce", jnp.abs), ("convert", integer.absolute)):
        hlo = jax.jit(lambda x, fn=fn: fn(x).max(-1)).lower(x).compile().as_text()
        assert takers_of_magnitudes(hlo) == {found}
