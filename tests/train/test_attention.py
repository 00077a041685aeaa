"""Attention of whole sequences, in query blocks, against the formula in float64."""

import jax
import numpy as np
import pytest

from detspec.model.dense import dense_config, with_fields
from detspec.ops.attention.sequences import attend_sequence

ROPE = dense_config(vocab_size=16, d_model=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=16)
ALIBI = with_fields(ROPE, position_encoding="alibi")
attend = jax.jit(attend_sequence, static_argnums=0, static_argnames="query_block")


def make_qkv(T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((2, T, 4, 8), (2, T, 2, 8), (2, T, 2, 8))
    q, k, v = (np.random.default_rng(T + i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes))
    return q, k, v


def attend_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray, slopes: tuple[float, ...] = (0, 0, 0, 0)) -> np.ndarray:
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    k64, v64 = (np.repeat(x, 2, axis=2) for x in (k64, v64))
    scores = np.einsum("BTNH,BSNH->BNTS", q64, k64) / np.sqrt(q.shape[-1])
    position = np.arange(scores.shape[-1])
    scores -= np.array(slopes)[:, None, None] * (position[:, None] - position)
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("BNTS,BSNH->BTNH", weights / weights.sum(-1, keepdims=True), v64)


@pytest.mark.parametrize("T", [1, 10])
def test_attention_in_blocks_is_the_formula(T: int):
    q, k, v = make_qkv(T)
    # 10 keys at most: a few float32 roundings of values of size 1 to 3.
    np.testing.assert_allclose(attend(ROPE.layer(0).mixer.scores, q, k, v, query_block=4), attend_float64(q, k, v), atol=2e-6)


def test_attention_with_linear_biases_is_the_formula():
    """4 heads: `2 ** (-8 (n + 1) / 4)`."""
    q, k, v = make_qkv(10)
    expected = attend_float64(q, k, v, slopes=(2**-2, 2**-4, 2**-6, 2**-8))
    np.testing.assert_allclose(attend(ALIBI.layer(0).mixer.scores, q, k, v, query_block=4), expected, atol=2e-6)  # as above
    assert np.abs(expected - attend_float64(q, k, v)).max() > 1e-2


def test_block_size_changes_no_gradient_beyond_rounding():
    q, k, v = make_qkv(7)

    def grads(size: int) -> tuple[jax.Array, ...]:
        return jax.jit(
            jax.grad(
                lambda *qkv: (attend_sequence(ROPE.layer(0).mixer.scores, *qkv, query_block=size) ** 2).sum(), argnums=(0, 1, 2)
            )
        )(q, k, v)

    for blocked, whole in zip(grads(3), grads(7), strict=True):
        np.testing.assert_allclose(blocked, whole, atol=1e-5)  # sums of some ten float32 products, some of size 10


def test_later_tokens_change_nothing():
    q, k, v = make_qkv(10)
    later = np.arange(10)[None, :, None, None] >= 6
    other = [np.where(later, np.float32(3.0), x) for x in (q, k, v)]
    before, after = (np.asarray(attend(ROPE.layer(0).mixer.scores, *qkv, query_block=4)) for qkv in ((q, k, v), other))
    assert before[:, :6].tobytes() == after[:, :6].tobytes()
    assert before[:, 6:].tobytes() != after[:, 6:].tobytes()
