"""The optimised programs of an engine with an integer model have no operation on floats: they move them, or look at them.

So no compiler, order or unit can change a bit. Floats that there are: numbers that requests ask for, whose bits are looked at,
and log-probabilities, whose bits are made of integers.
"""

from collections import Counter

import pytest
from instructions import Instruction, instructions

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine.device import Device
from detspec.engine.engine_config import EngineConfig
from detspec.engine.policy import Needs, needed_plans
from detspec.model.dense import with_fields
from detspec.schedule import Numerics, Schedule
from tests.fakes import random_model
from tests.integer.models import CFGS, SCHEDULE, both

pytestmark = pytest.mark.optimised
CFG = with_fields(CFGS["qkv_bias, llama3"], num_layers=1)
MOVES = {
    *("parameter", "tuple", "get-tuple-element", "while", "conditional", "call", "fusion", "constant", "copy", "copy-start"),
    *("copy-done", "bitcast", "bitcast-convert", "select", "broadcast", "concatenate", "slice", "dynamic-slice"),
    *("dynamic-update-slice", "gather", "scatter", "reshape", "transpose", "pad"),
}
LOOKS = {"is-finite"}  # at log-probabilities: nan ends a text with an error
CHANCES = ("/allot/", "/draft/")  # of drafts to be accepted: they decide how much is drafted, and no bit of what is committed


def on_floats(hlo: str) -> list[Instruction]:
    """The instructions that read or make floats, but for those that move them."""
    every = list(instructions(hlo))
    by_name = {each.name: each for each in every}
    return [
        each
        for each in every
        if each.opcode not in MOVES
        and (each.is_float or any(by_name[name].is_float for name in each.operands if name in by_name))
        and not any(chances in each.op_name for chances in CHANCES)
    ]


def texts(model: Model, schedule: Schedule) -> dict[str, str]:
    """Optimised HLO of the programs that an engine needs for requests of any kind, with drafts.

    XLA's own passes run; only LLVM's, which have no say in what is computed, are left out.
    """
    config = EngineConfig(max_requests=3, max_len=64, method="ngram", schedule=schedule, compile_cache=False)
    device = Device(model, config)
    device.prefills_apart = True
    needs = Needs(deterministic=True, ordinary=False, processing=True)
    plans = [plan for plan in needed_plans(config, device.schedule, 4, needs) if not plan.ordinary]
    found = {}
    for call in device.calls(plans[-1:]):
        cfg = () if call.cfg is None else (call.cfg,)
        lowered = call.fn.lower(*call.args[:1], *cfg, *call.args[1:], **call.static)
        compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        found[f"{call.fn.__name__} {len(found)}"] = compiled.as_text()
    return found


@pytest.mark.slow
def test_programs_of_an_integer_model_only_move_floats():
    found = texts(both(CFG, random_model(CFG)).model, SCHEDULE)
    assert {name.partition(" ")[0] for name in found} >= {"run_segment", "read_sequences", "prefill_sequences"}
    for name, hlo in found.items():
        assert Counter((each.opcode, each.op_name) for each in on_floats(hlo) if each.opcode not in LOOKS) == Counter(), name


@pytest.mark.slow
def test_control_of_programs_in_floats_multiply_them():
    params = random_model(CFG)
    schedule = SCHEDULE.with_numerics(cache_dtype=Numerics().cache_dtype)
    for name, hlo in texts(Model(CFG, params, None, (), digest_model(CFG, params)), schedule).items():
        if name.startswith("run_segment"):
            assert {"multiply", "add"} <= {each.opcode for each in on_floats(hlo)}, name
