"""Tokens and log-probability bits on 2, 4 and 8 chips are those of one."""

from functools import cache

import jax
import pytest

from detspec.engine.certify_mesh import certify_mesh
from detspec.engine.device import Device
from detspec.engine.engine_config import EngineConfig
from detspec.sampling_params import SamplingParams
from tests.fakes import random_model
from tests.mesh.conftest import model_on
from tests.mesh.shapes import CFG, FAMILIES, THINKER_CFG, Facts, engine_on, facts, job, plain_job, schedule_for


@pytest.mark.optimised
@pytest.mark.parametrize("name", FAMILIES)
def test_canonical_passes_of_every_family_have_the_bits_of_one_chip(name):
    cfg = FAMILIES[name]
    config = EngineConfig(max_requests=3, max_len=64, schedule=schedule_for(cfg), compile_cache=False)
    assert certify_mesh(Device(model_on(cfg, 4), config)) == ""


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


def test_new_weights_go_where_the_old_ones_lie():
    changed = jax.tree.map(lambda leaf: leaf * 2, random_model(CFG))
    asked = [[1, 2, 3]], SamplingParams(max_tokens=8)
    found = []
    for num_chips in (1, 4):
        engine = engine_on(model_on(CFG, num_chips))
        before = engine.generate(*asked)
        engine.update_params(changed)
        found.append([facts(one) for one in (*before, *engine.generate(*asked))])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
