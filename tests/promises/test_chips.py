"""A sharded model gives the bits of one chip: chips gather finished values and never add partial sums of floats.

Models run on 2, 4 and 8 simulated devices. In the control chips add what they have of a product, as most sharded models do.
"""

import dataclasses
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from detspec.engine.certify_mesh import certify_mesh
from detspec.engine.device import Device
from detspec.engine.engine_config import EngineConfig
from detspec.model.mlp import GatedMLP
from tests.mesh.conftest import model_on
from tests.mesh.shapes import CFG, FAMILIES, KINDS, THINKER_CFG, Facts, job, mlp_added_across_chips, plain_job, schedule_for

TRIED = ("gemma2", "qwen3", "shared experts")  # the others are slow tests
# Kinds of layers with values that are gathered, or cut, otherwise than those of Llama.
GATHERED = ("post norms, width norms", "part rotated", "parallel", "learned positions", "shared experts")


def cases(names: Iterable[str]) -> list[Any]:
    """Names with their marks."""
    slow = {*FAMILIES, *GATHERED}
    return [
        pytest.param(name, marks=() if name in TRIED else pytest.mark.slow if name in slow else pytest.mark.sweep)
        for name in names
    ]


@pytest.mark.optimised
@pytest.mark.parametrize("name", cases(FAMILIES))
def test_canonical_passes_of_every_family_have_the_bits_of_one_chip(name):
    cfg = FAMILIES[name]
    config = EngineConfig(max_requests=3, max_len=64, schedule=schedule_for(cfg), compile_cache=False)
    assert certify_mesh(Device(model_on(cfg, 4), config)) == ""


@pytest.mark.optimised
@pytest.mark.parametrize("name", cases(KINDS))
def test_canonical_passes_of_every_kind_of_layer_have_the_bits_of_one_chip(name):
    config = EngineConfig(max_requests=3, max_len=64, schedule=schedule_for(KINDS[name]), compile_cache=False)
    assert certify_mesh(Device(model_on(KINDS[name], 2), config)) == ""


@pytest.mark.optimised
@pytest.mark.parametrize("num_chips", [2, 4])
def test_control_products_added_across_chips_have_other_bits(num_chips, monkeypatch):
    monkeypatch.setattr(GatedMLP, "rows", mlp_added_across_chips)
    cfg = dataclasses.replace(CFG, dtype="float32")  # rounding to bfloat16 hides most differences
    config = EngineConfig(max_requests=3, max_len=64, schedule=schedule_for(cfg), compile_cache=False)
    assert certify_mesh(Device(model_on(cfg, num_chips), config)) != ""


@cache
def on_one_chip() -> list[Facts]:
    """Completions of the job on one chip, one canonical row at a time, nothing shared."""
    return job(model_on(CFG, 1), prefix_sharing=False)


@pytest.mark.parametrize(
    ("num_chips", "how"),
    [
        (2, {"order": -1, "num_pages": 9, "max_requests": 3}),  # with few pages, requests are preempted
        (4, {"method": "self"}),
        (8, {"method": "self", "order": -1}),  # 2 x 4: each KV head lies on four of them
    ],
    ids=["2-preempted", "4-drafted", "8-reversed"],
)
def test_requests_of_all_kinds_have_the_bits_of_one_chip(num_chips, how):
    assert job(model_on(CFG, num_chips), **how) == on_one_chip()


def test_model_that_thinks_has_the_same_thoughts_and_bits_on_two_chips():
    found = plain_job(model_on(THINKER_CFG, 2))
    assert found == plain_job(model_on(THINKER_CFG, 1))
    assert any(one[5] for one in found)
