"""Tokens that the kernel draws are those that XLA draws from the same logits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.ops import draws
from detspec.sampler import FLOATS
from detspec.sampler import draw as draw_by_xla
from detspec.sampling_params import SamplingParams, sampling_arrays
from detspec.state import SamplingArrays

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_p": 0.95},
    {"temperature": 0.3, "top_p": 0.01},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.8, "top_k": 900, "top_p": 0.5},
    {"temperature": 0.8, "top_k": 10**6, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.5, "top_p": 0.9, "top_k": 3},
    {"temperature": 1e-25, "top_p": 0.9},
)
by_kernel = jax.jit(partial(draws.draw, cache_dtype="bfloat16"))
by_xla = jax.jit(partial(draw_by_xla, numbers=FLOATS, has_filters=True))
LOGITS = {
    "wide": lambda rng, shape: 5 * rng.standard_normal(shape),
    "flat": lambda rng, shape: 0.1 * rng.standard_normal(shape),
    "equals": lambda rng, shape: np.round(2 * rng.standard_normal(shape)) / 2,
    "bans": lambda rng, shape: np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)),
    "huge": lambda rng, shape: 1e20 * rng.standard_normal(shape),
}


def rows_of(ways: tuple[dict[str, Any], ...], seed: int = 0) -> SamplingArrays:
    given = [SamplingParams(seed=seed + i, **way) for i, way in enumerate(ways)]
    arrays = sampling_arrays(given, [1] * len(given), eos_ids=[], max_stop_ids=1, max_logit_bias=1)
    return jax.tree.map(jnp.asarray, arrays)


@pytest.mark.parametrize("vocab_size", [1, 7, 48, 1003, 20_000])
@pytest.mark.parametrize("kind", LOGITS)
def test_tokens_are_those_of_xla(vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size)
    for seed in range(4):
        rows = rows_of(WAYS, 100 * seed)
        logits = jnp.asarray(LOGITS[kind](rng, (len(WAYS), vocab_size)), jnp.float32)
        position = jnp.asarray(rng.integers(0, 100_000, len(WAYS)), jnp.int32)
        np.testing.assert_array_equal(by_kernel(logits, position, rows), by_xla(logits, position, rows))


def test_other_seeds_and_positions_draw_other_tokens() -> None:
    logits = jnp.zeros((64, 5000))
    rows = rows_of(({"temperature": 1.0},) * 64)
    position = jnp.arange(64, dtype=jnp.int32)
    tokens = np.asarray(by_kernel(logits, position, rows))
    assert len(set(tokens.tolist())) > 55  # of 64 among 5,000
    assert (tokens != np.asarray(by_kernel(logits, position + 1, rows))).mean() > 0.9
    later = rows_of(({"temperature": 1.0},) * 64, seed=1000)
    assert (tokens != np.asarray(by_kernel(logits, position, later))).mean() > 0.9


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    share = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
    logits = jnp.broadcast_to(jnp.log(share), (20_000, 4))
    rows = rows_of(({"temperature": 1.0},) * 20_000)
    tokens = np.asarray(by_kernel(logits, jnp.zeros(20_000, jnp.int32), rows))
    # Shares of 20,000 draws have deviations of up to 0.0035.
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20_000, share, atol=0.015)


def test_a_row_without_a_number_has_a_token_nevertheless() -> None:
    logits = jnp.asarray([[0.0, np.nan, 1.0], [-np.inf] * 3, [0.0, np.inf, 1.0]])
    rows = rows_of(({"temperature": 1.0, "top_p": 0.9},) * 3)
    tokens = np.asarray(by_kernel(logits, jnp.zeros(3, jnp.int32), rows))
    assert ((tokens >= 0) & (tokens < 3)).all()
