"""A request whose logits are not finite ends with an error and leaves no trace in anybody else's bits."""

import jax.numpy as jnp
import pytest

from detspec.engine.engine import Engine
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import byte_params, make_engine, without_tokenizer

BROKEN = 95  # a token whose embedding is nan
SAMPLING = SamplingParams(max_tokens=12)
GOOD = [[1, 2, 3], [40, 41], [7, 8, 9, 10]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    params = byte_params()
    return make_engine(without_tokenizer({**params, "embed": params["embed"].at[BROKEN].set(jnp.nan)}), 3, "none")


def test_not_finite_request_ends_with_error_and_no_tokens(engine: Engine) -> None:
    (broken,) = engine.generate([[5, BROKEN, 6]], SAMPLING)
    assert broken.finish_reason == "error"
    assert broken.token_ids == ()


def test_not_finite_neighbours_and_later_requests_keep_their_bits(engine: Engine) -> None:
    clean = engine.generate(GOOD, SAMPLING)
    assert [c.finish_reason for c in clean] == ["length"] * 3
    # Every row holds nan at some time, and every good request runs next to one that does, or after it in its pages.
    long, short = [BROKEN] * 20, [5, BROKEN, 6]
    mixed = engine.generate([long, short, long, GOOD[0], short, GOOD[1], GOOD[2], short], SAMPLING)
    assert [c.finish_reason for c in mixed] == [*["error"] * 3, "length", "error", "length", "length", "error"]
    for expected, found in zip(clean, (mixed[3], mixed[5], mixed[6]), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs


def test_not_finite_values_never_enter_the_cache(engine: Engine) -> None:
    engine.generate([[BROKEN] * 20, [5, BROKEN, 6]], SAMPLING)
    assert all(bool(jnp.isfinite(pool).all()) for _, pool in engine.device.state.cache.pools)
    assert not all(bool(jnp.isfinite(pool).all()) for pool, _ in engine.device.state.cache.pools)  # it was there
