"""An integer model has the same texts on one, two, four and eight chips."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.checkpoint.hf import save_hf
from detspec.model.dense import with_fields
from detspec.model.params import init_params
from tests.fakes import RANDOM_CFG
from tests.integer.models import FAMILIES

PROMPTS = ["def add(a, b):\n", "x = ", "import numpy as np\n"]
SAMPLING = [
    ds.SamplingParams(max_tokens=6, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 0.8, 1.2)
]


def texts(
    chips: int, model: str | Path = "tiny_python", prompts: Any = PROMPTS, weights: str = "integer"
) -> list[tuple[tuple[int, ...], bytes]]:
    model = ds.load(model, weights=weights, chips=chips)
    engine = ds.Engine(model, ds.EngineConfig(max_requests=3, max_len=32, method="none"))
    used = {device for leaf in jax.tree.leaves(engine.model.params) for device in leaf.devices()}
    assert len(used) == chips
    return [(each.token_ids, np.asarray(each.logprobs, np.float32).tobytes()) for each in engine.generate(prompts, SAMPLING)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[tuple[int, ...], bytes]]:
    return texts(1)


@pytest.mark.parametrize("chips", [2, 4])
def test_texts_on_chips_are_those_on_one(chips, alone):
    assert texts(chips) == alone


@pytest.mark.slow
def test_texts_with_activations_of_8_bits_on_two_chips_are_those_on_one(alone):
    found = texts(2, weights="integer8")
    assert found == texts(1, weights="integer8")
    assert found != alone


@pytest.mark.slow
def test_texts_on_eight_chips_are_those_on_one(tmp_path):
    """A model with eight heads: those of the shipped ones are too few."""
    cfg = with_fields(RANDOM_CFG, num_heads=8, num_kv_heads=8, head_dim=8, vocab_size=216)
    folder = tmp_path / "model"
    save_hf(folder, cfg, init_params(cfg, jax.random.key(0)))
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    assert texts(8, folder, prompts) == texts(1, folder, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
@pytest.mark.parametrize("weights", ["integer", "integer8"])
def test_texts_of_further_families_on_four_chips_are_those_on_one(name, weights, tmp_path):
    """Norms after a part read whole rows, and norms over all heads those of all chips."""
    cfg = with_fields(FAMILIES[name], vocab_size=216)
    folder = tmp_path / "model"
    save_hf(folder, cfg, init_params(cfg, jax.random.key(0)))
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    assert texts(4, folder, prompts, weights) == texts(1, folder, prompts, weights)


def test_digest_does_not_depend_on_chips():
    assert ds.load(weights="integer", chips=2).digest == ds.load(weights="integer").digest
