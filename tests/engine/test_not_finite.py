"""A request whose logits are not finite ends with an error and leaves no trace in anybody else's bits."""

import jax
import jax.numpy as jnp
import pytest

from detspec.checkpoint.load import Model
from detspec.config import ModelConfig, Schedule
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.model.params import init_params
from detspec.sampling import SamplingParams

CFG = ModelConfig(
    vocab_size=97,
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=96,
    max_position=128,
    dtype="bfloat16",
)
BROKEN = 95  # a token whose embedding is nan
SAMPLING = SamplingParams(max_tokens=12)
GOOD = [[1, 2, 3], [40, 41], [7, 8, 9, 10]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    params = init_params(CFG, jax.random.key(0))
    params["embed"] = params["embed"].at[BROKEN].set(jnp.nan)
    model = Model(CFG, params, None, (), "broken")
    return Engine(model, EngineConfig(max_rows=2, max_len=64, method="none", schedule=Schedule(rows=16, window=8)))


def test_not_finite_request_ends_with_error_and_no_tokens(engine: Engine) -> None:
    (broken,) = engine.generate([[5, BROKEN, 6]], SAMPLING)
    assert broken.finish_reason == "error"
    assert broken.token_ids == ()


def test_not_finite_neighbours_and_later_requests_keep_their_bits(engine: Engine) -> None:
    clean = engine.generate(GOOD, SAMPLING)
    assert [c.finish_reason for c in clean] == ["length"] * 3
    # Every row holds nan at some time, and every good request runs beside one that does, or after it in its pages.
    broken = [[BROKEN] * 20, [5, BROKEN, 6]]
    mixed = engine.generate([broken[0], broken[1], GOOD[0], broken[0], GOOD[1], GOOD[2], broken[1]], SAMPLING)
    assert [c.finish_reason for c in mixed] == ["error", "error", "length", "error", "length", "length", "error"]
    for expected, found in zip(clean, (mixed[2], mixed[4], mixed[5]), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs


def test_not_finite_values_never_enter_the_cache(engine: Engine) -> None:
    engine.generate([[BROKEN] * 20, [5, BROKEN, 6]], SAMPLING)
    assert all(bool(jnp.isfinite(pool).all()) for pool in engine._runner.state.cache.v)
    assert not all(bool(jnp.isfinite(pool).all()) for pool in engine._runner.state.cache.k)  # it was there
