"""The riders that docs/extending.md builds do what they say."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import jax
import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.riders.rider import Rider, shares_pages
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import SCHEDULE
from tests.examples import example
from tests.riders.adapted import MODEL, engine_of, requests


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> ModuleType:
    return example("Adapters of low rank", tmp_path_factory)


def test_automaton_closes_its_brackets(tmp_path_factory):
    brackets = example("An automaton that adds a bias", tmp_path_factory)
    assert ")" not in brackets.texts["0"]
    assert brackets.texts["20"][0] == ")"


def test_adapters_of_the_page_give_other_texts(adapters):
    assert len(set(adapters.texts.values())) == 3


@pytest.mark.parametrize("name", ["letters", "memos"])
def test_adapter_has_the_log_probabilities_of_weights_that_it_is_merged_into(name, adapters):
    cfg = dataclasses.replace(MODEL.cfg, dtype="float32")
    params = jax.tree.map(lambda leaf: leaf.astype("float32"), MODEL.params)
    own = slice(adapters.NAMES.index(name) * adapters.RANK, (adapters.NAMES.index(name) + 1) * adapters.RANK)
    merged = [
        {**layer, "down": layer["down"] + up[:, own] @ down[own]}
        for layer, (down, up) in zip(params["layers"], adapters.adapters(cfg), strict=True)
    ]
    schedule = SCHEDULE.with_numerics(cache_dtype="float32")

    def logprobs(params, riders: Sequence[Rider], brings: dict[str, str]) -> np.ndarray:
        model = dataclasses.replace(MODEL, cfg=cfg, params=params)
        engine = Engine(model, EngineConfig(max_requests=2, max_len=64, method="none", schedule=schedule), riders=riders)
        asked = Request("0", tuple(range(20)), SamplingParams(), given_token_ids=tuple(range(40, 60)), brings=brings)
        return np.asarray(next(engine.run([asked])).logprobs)

    found = logprobs(params, (adapters.ADAPTERS,), {"adapter": name})
    np.testing.assert_allclose(found, logprobs({**params, "layers": merged}, (), {}), atol=1e-4)
    assert np.abs(found - logprobs(params, (), {})).max() > 0.1


def test_riders_that_would_make_keys_and_values_depend_on_the_text_are_refused(adapters):
    shared = adapters.ADAPTERS._replace(page_key=shares_pages)
    following = adapters.ADAPTERS._replace(follow=lambda shared, state, tokens: state)
    for rider in (shared, following):
        with pytest.raises(InputError, match="'adapter' works on products, on which keys and values depend"):
            engine_of("none", (rider,))
    with pytest.raises(InputError, match="adapter must be one of letters, memos, got 'poems'"):
        list(engine_of("none", (adapters.ADAPTERS,)).run(requests(["poems"])))
