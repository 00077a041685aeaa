"""Bits of a request do not depend on what others bring along: adapters of their own, or none.

Rows of one pass are multiplied with different adapters. The controls take an adapter whose strength depends on all rows of a
pass, and keys of shared pages that do not name the adapter.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Completion, Request
from detspec.riders.rider import Rider
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import facts
from tests.examples import example
from tests.riders.adapted import BROUGHT, engine_of, requests, run

pytestmark = pytest.mark.optimised


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> ModuleType:
    return example("Adapters of low rank", tmp_path_factory)


def one_by_one(engine: Engine) -> list[Completion]:
    """Each request by itself, one canonical row a pass."""
    return [run(engine, [request])[0] for request in requests()]


@pytest.fixture(scope="module")
def alone(adapters) -> list[Completion]:
    return one_by_one(engine_of("none", (adapters.ADAPTERS,)))


@pytest.mark.parametrize("method", ["self", "int8"])
def test_requests_with_several_adapters_have_the_bits_of_each_alone(method, adapters, alone):
    engine = engine_of(method, (adapters.ADAPTERS,))
    found = run(engine, requests())
    assert [facts(c) for c in found] == [facts(c) for c in alone]
    assert [c.digest for c in found] == [c.digest for c in alone]
    assert engine.num_preemptions > 0
    assert engine.stats.num_accepted_draft_tokens > 0


def test_requests_that_bring_nothing_have_the_bits_of_an_engine_without_riders(alone):
    plain = run(engine_of("none", ()), requests([None] * len(BROUGHT)))
    for name, without, with_it in zip(BROUGHT, plain, alone, strict=True):
        assert (facts(without) == facts(with_it)) == (name is None)
        assert (without.digest == with_it.digest) == (name is None)


def test_control_adapter_that_depends_on_all_rows_of_a_pass_gives_other_bits(adapters):
    def linear(shared, adapter, product):
        changed = adapters.linear(shared, adapter, product)
        return changed * (1 + (adapter >= 0).mean(dtype=np.float32) / 8)

    careless = adapters.ADAPTERS._replace(linear=linear)
    engine = engine_of("none", (careless,))
    assert [facts(c) for c in run(engine, requests())] != [facts(c) for c in one_by_one(engine)]


def has_the_bits_of_itself_alone_after_another(rider: Rider, names: Sequence[str]) -> bool:
    """Whether a request has the same bits after one with the same prompt and another adapter as by itself."""
    sampling = SamplingParams(max_tokens=8)
    first, second = (Request("0", tuple(range(40)), sampling, brings={"adapter": name}) for name in names)
    engine = engine_of("none", (rider,))
    (alone,) = run(engine_of("none", (rider,)), [second])
    _, (after,) = run(engine, [first]), run(engine, [second])
    return facts(after) == facts(alone)


def test_requests_share_pages_with_those_of_their_adapter_only(adapters):
    assert has_the_bits_of_itself_alone_after_another(adapters.ADAPTERS, adapters.NAMES)


def test_control_pages_under_keys_without_the_adapter_give_other_bits(adapters):
    careless = adapters.ADAPTERS._replace(page_key=lambda request: b"any")
    assert not has_the_bits_of_itself_alone_after_another(careless, adapters.NAMES)
