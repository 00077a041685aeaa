"""The riders that docs/extending.md builds: they do what they say, and no bit depends on drafts, neighbours or preemptions."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import jax
import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.model.dense import with_fields
from detspec.model.params import init_params
from detspec.riders.rider import Rider, shares_pages
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, facts, some_prompts
from tests.examples import example

CFG = with_fields(BYTE_CFG, num_layers=2)  # keys and values of the second layer depend on what the first one adapts
PARAMS = init_params(CFG, jax.random.key(1))
MODEL = Model(CFG, PARAMS, None, (), digest_model(CFG, PARAMS))
BROUGHT = ("letters", None, "memos", "letters", None, "memos")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> ModuleType:
    return example("Adapters of low rank", tmp_path_factory)


def engine_of(method: str, riders: Sequence[Rider]) -> Engine:
    """Four places and pages for two of them, so that sequences are preempted half way; all engines share programs."""
    config = EngineConfig(max_requests=4, max_len=64, method=method, num_pages=8, num_speculative_tokens=3, schedule=SCHEDULE)
    return Engine(MODEL, config, riders=riders)


def requests(brought: Sequence[str | None] = BROUGHT) -> list[Request]:
    """Greedy and sampled ones of 30 tokens."""
    return [
        Request(
            str(i),
            tuple(prompt),
            SamplingParams(max_tokens=30, temperature=(0.0, 0.8)[i % 2], seed=i),
            brings={} if name is None else {"adapter": name},
        )
        for i, (prompt, name) in enumerate(zip(some_prompts(len(brought)), brought, strict=True))
    ]


def run(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    return sorted(engine.run(asked), key=lambda completion: int(completion.id))


def test_automaton_closes_its_brackets(tmp_path_factory):
    brackets = example("An automaton that adds a bias", tmp_path_factory)
    assert ")" not in brackets.texts["0"]
    assert brackets.texts["20"][0] == ")"


def test_adapters_of_the_page_give_other_texts(adapters):
    assert len(set(adapters.texts.values())) == 3


def one_by_one(engine: Engine) -> list[Completion]:
    """Each request by itself, one canonical row a pass."""
    return [run(engine, [request])[0] for request in requests()]


@pytest.fixture(scope="module")
def alone(adapters) -> list[Completion]:
    return one_by_one(engine_of("none", (adapters.ADAPTERS,)))


@pytest.mark.optimised
@pytest.mark.parametrize("method", ["self", "int8"])
def test_requests_with_several_adapters_have_the_bits_of_each_alone(method, adapters, alone):
    engine = engine_of(method, (adapters.ADAPTERS,))
    found = run(engine, requests())
    assert [facts(c) for c in found] == [facts(c) for c in alone]
    assert [c.digest for c in found] == [c.digest for c in alone]
    assert engine.num_preemptions > 0
    assert engine.stats.num_accepted_draft_tokens > 0


@pytest.mark.optimised
def test_rows_that_depend_on_their_neighbours_are_found_out(adapters):
    """The inverse control: an adapter whose strength depends on all rows of a pass."""

    def linear(shared, adapter, product):
        changed = adapters.linear(shared, adapter, product)
        return changed * (1 + (adapter >= 0).mean(dtype=np.float32) / 8)

    careless = adapters.ADAPTERS._replace(linear=linear)
    engine = engine_of("none", (careless,))
    assert [facts(c) for c in run(engine, requests())] != [facts(c) for c in one_by_one(engine)]


@pytest.mark.optimised
def test_requests_that_bring_nothing_have_the_bits_of_an_engine_without_riders(alone):
    plain = run(engine_of("none", ()), requests([None] * len(BROUGHT)))
    for name, without, with_it in zip(BROUGHT, plain, alone, strict=True):
        assert (facts(without) == facts(with_it)) == (name is None)
        assert (without.digest == with_it.digest) == (name is None)


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


def test_requests_share_pages_with_those_of_their_adapter_only(adapters):
    """The inverse control: where pages are shared across adapters, the second request reads those of the first."""

    def after_another(rider: Rider) -> bool:
        """Whether a request has the same bits after one with the same prompt and another adapter as by itself."""
        asked = {
            name: Request("0", tuple(range(40)), SamplingParams(max_tokens=8), brings={"adapter": name})
            for name in adapters.NAMES
        }
        engine = engine_of("none", (rider,))
        (alone,) = run(engine_of("none", (rider,)), [asked["memos"]])
        _, (after,) = (run(engine, [asked[name]]) for name in ("letters", "memos"))
        return facts(after) == facts(alone)

    assert after_another(adapters.ADAPTERS)
    assert not after_another(adapters.ADAPTERS._replace(page_key=lambda request: b"any"))


def test_riders_that_would_make_keys_and_values_depend_on_the_text_are_refused(adapters):
    shared = adapters.ADAPTERS._replace(page_key=shares_pages)
    following = adapters.ADAPTERS._replace(follow=lambda shared, state, tokens: state)
    for rider in (shared, following):
        with pytest.raises(InputError, match="'adapter' works on products, on which keys and values depend"):
            engine_of("none", (rider,))
    with pytest.raises(InputError, match="adapter must be one of letters, memos, got 'poems'"):
        list(engine_of("none", (adapters.ADAPTERS,)).run(requests(["poems"])))
