"""An integer model has the same texts on one, two and four chips, and on one chip the definition's."""

import jax
import numpy as np
import pytest

import detspec as ds

PROMPTS = ["def add(a, b):\n", "x = ", "import numpy as np\n"]
SAMPLING = [
    ds.SamplingParams(max_tokens=6, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 0.8, 1.2)
]


def texts(chips: int) -> list[tuple[tuple[int, ...], bytes]]:
    model = ds.load(weights="integer", chips=chips)
    engine = ds.Engine(model, ds.EngineConfig(max_requests=3, max_len=32, method="none"))
    used = {device for leaf in jax.tree.leaves(engine.model.params) for device in leaf.devices()}
    assert len(used) == chips
    return [(each.token_ids, np.asarray(each.logprobs, np.float32).tobytes()) for each in engine.generate(PROMPTS, SAMPLING)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[tuple[int, ...], bytes]]:
    return texts(1)


@pytest.mark.parametrize("chips", [2, 4])
def test_texts_on_chips_are_those_on_one(chips, alone):
    assert texts(chips) == alone


def test_digest_does_not_depend_on_chips():
    assert ds.load(weights="integer", chips=2).digest == ds.load(weights="integer").digest
