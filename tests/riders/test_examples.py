"""The riders that docs/extending.md builds do what they say."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.riders.rider import Rider, shares_pages
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import SCHEDULE, facts, some_prompts
from tests.examples import example
from tests.riders.adapted import engine_of, plain_model, requests, run

pytestmark = pytest.mark.slow


def sharp() -> Model:
    """A model some of whose tokens are far more likely than others."""
    params = plain_model().params
    return dataclasses.replace(plain_model(), params={**params, "head": params["head"] * 4}, digest="sharp")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> ModuleType:
    return example("Adapters of low rank", tmp_path_factory)


@pytest.fixture(scope="module")
def top_a(tmp_path_factory) -> ModuleType:
    return example("A sampling rule of your own", tmp_path_factory)


def sampled(a: float | None) -> list[Request]:
    """Requests at temperature 1, all of them with the rule or none."""
    sampling = SamplingParams(max_tokens=30, temperature=1.0, logprobs=1)
    brings = {} if a is None else {"top_a": a}
    return [
        Request(str(i), tuple(prompt), dataclasses.replace(sampling, seed=i), brings=brings)
        for i, prompt in enumerate(some_prompts(6))
    ]


def least_margin(completions: Sequence[Completion], a: float = 0.5) -> float:
    """The smallest `log p - log(a * largest p ** 2)` among all their tokens."""
    return min(
        logprob - np.log(a) - 2 * top[0][1]
        for completion in completions
        for logprob, top in zip(completion.logprobs, completion.top_logprobs, strict=True)
    )


def test_sampling_rule_of_the_page_drops_what_it_says(top_a):
    engine = engine_of("none", (top_a.TOP_A,), sharp())
    assert least_margin(run(engine, sampled(0.5))) > -1e-4  # log-probabilities are rounded
    assert least_margin(run(engine, sampled(None))) < -1
    with pytest.raises(InputError, match=r"top_a must be a number between 0 and 1, got 1\.5"):
        run(engine, sampled(1.5))


@pytest.mark.optimised
def test_sampling_rule_of_the_page_has_the_bits_of_each_request_alone(top_a):
    """The inverse control, whose bound depends on all rows of a pass, is not certified."""
    together = run(engine_of("self", (top_a.TOP_A,), sharp()), sampled(0.5))
    engine = engine_of("none", (top_a.TOP_A,), sharp())
    alone = [run(engine, [request])[0] for request in sampled(0.5)]
    assert [(facts(c), c.digest) for c in together] == [(facts(c), c.digest) for c in alone]
    assert [facts(c) for c in together] != [facts(c) for c in run(engine, sampled(None))]

    def by_all_rows(shared, rows, logits_f32):
        return jnp.where(logits_f32 >= logits_f32.max() - 4, logits_f32, -jnp.inf)

    with pytest.raises(InputError, match="this device does not certify the canonical pass"):
        run(engine_of("self", (top_a.TOP_A._replace(logits=by_all_rows),), sharp()), sampled(0.5))


def test_automaton_closes_its_brackets(tmp_path_factory):
    brackets = example("An automaton that adds a bias", tmp_path_factory)
    assert ")" not in brackets.texts["0"]
    assert brackets.texts["20"][0] == ")"


def test_adapters_of_the_page_give_other_texts(adapters):
    assert len(set(adapters.texts.values())) == 3


@pytest.mark.parametrize("name", ["letters", "memos"])
def test_adapter_has_the_log_probabilities_of_weights_that_it_is_merged_into(name, adapters):
    cfg = dataclasses.replace(plain_model().cfg, dtype="float32")
    params = jax.tree.map(lambda leaf: leaf.astype("float32"), plain_model().params)
    own = slice(adapters.NAMES.index(name) * adapters.RANK, (adapters.NAMES.index(name) + 1) * adapters.RANK)
    merged = [
        {**layer, "down": layer["down"] + up[:, own] @ down[own]}
        for layer, (down, up) in zip(params["layers"], adapters.adapters(cfg), strict=True)
    ]
    schedule = SCHEDULE.with_numerics(cache_dtype="float32")

    def logprobs(params, riders: Sequence[Rider], brings: dict[str, str]) -> np.ndarray:
        model = dataclasses.replace(plain_model(), cfg=cfg, params=params)
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
