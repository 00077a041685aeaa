"""`detspec.logprobs` has the bits of generation, alone and inside of a gradient's program, and its derivatives are right.

The control of bits is the ordinary forward pass, that of gradients a derivative with one part left out.
"""

import dataclasses
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec import score
from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.generation.logprobs import logprobs
from detspec.generation.loop import generate
from detspec.model.params import Params
from detspec.model.transformer import forward_sequences
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from tests.fakes import ALIBI_CFG, FAMILY_CFGS, LAYER_CFGS, bits, random_model

CFGS = {**FAMILY_CFGS, **LAYER_CFGS, "alibi": ALIBI_CFG}
TEMPERATURES = (0.6, 0.9, 1.0, 1.7)
ENDS = (48, 16, 33, 47, 17, 40, 32, 25)  # of texts, in pages of 16: one to three of them
DTYPES = ("float32", "bfloat16", "float16")


class Texts(NamedTuple):
    """Generated texts `[B, T]` with what generation reported."""

    tokens: jax.Array
    lengths: jax.Array  # [B]
    temperature: jax.Array  # [B]
    reported: np.ndarray  # [B, T] float32
    is_new: np.ndarray  # [B, T]

    def first(self, number: int) -> "Texts":
        return Texts(*(leaf[:number] for leaf in self))


def schedule_of(cfg: ModelConfig) -> Schedule:
    """What a user has here, in shorter pages and passes, which decide no bit of a row; windows of one row need no draft."""
    return default_schedule(cfg).with_numerics(page=16).with_budget(8, 1)


@cache
def generated(cfg: ModelConfig, number: int) -> Texts:
    rng = np.random.default_rng(number)
    lengths = np.asarray([ENDS[i % len(ENDS)] for i in range(number)], np.int32)
    prompts = [rng.integers(0, cfg.vocab_size, 1 + (5 * i) % 13).tolist() for i in range(number)]
    temperature = [TEMPERATURES[(i + i // len(ENDS)) % len(TEMPERATURES)] for i in range(number)]
    sampling = [
        SamplingParams(max_tokens=int(end) - len(prompt), temperature=t, seed=i, logprobs_mode="tempered")
        for i, (end, prompt, t) in enumerate(zip(lengths, prompts, temperature, strict=True))
    ]
    state = generate(random_model(cfg), cfg, prompts, sampling, schedule=schedule_of(cfg))
    assert state.committed.tolist() == lengths.tolist()
    position = np.arange(state.tokens.shape[1])[None, :]
    is_new = (position >= np.asarray([len(prompt) for prompt in prompts])[:, None]) & (position < lengths[:, None])
    return Texts(state.tokens, jnp.asarray(lengths), jnp.asarray(temperature, jnp.float32), np.asarray(state.logprobs), is_new)


def masters(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def forward(cfg: ModelConfig, texts: Texts) -> jax.Array:
    @jax.jit
    def found(params: Params) -> jax.Array:
        return logprobs(params, cfg, *texts[:2], temperature=texts.temperature, schedule=schedule_of(cfg))

    return found(random_model(cfg))


def in_gradient(cfg: ModelConfig, texts: Texts, *, remat: bool = False) -> jax.Array:
    """The log-probabilities that the program of a gradient works with."""

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        found = logprobs(params, cfg, *texts[:2], temperature=texts.temperature, schedule=schedule_of(cfg), remat=remat)
        return -(found * jnp.exp(found)).sum(), found

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(masters(random_model(cfg)))[0][1]


def ordinary(cfg: ModelConfig, texts: Texts) -> jax.Array:
    """What an ordinary trainer finds."""

    @jax.jit
    def found(params: Params) -> jax.Array:
        logits_f32, _ = forward_sequences(params, cfg, texts.tokens)
        of_all = jax.nn.log_softmax(logits_f32 / texts.temperature[:, None, None])
        of_next = jnp.take_along_axis(of_all[:, :-1], texts.tokens[:, 1:, None], axis=2)[..., 0]
        return jnp.pad(of_next, ((0, 0), (1, 0)))

    return found(random_model(cfg))


def num_differing(found: jax.Array, texts: Texts) -> int:
    return int((bits(found)[texts.is_new] != bits(texts.reported)[texts.is_new]).sum())


def in_dtype(kind: str, dtype: str) -> ModelConfig:
    return dataclasses.replace(CFGS[kind], dtype=dtype)


@pytest.mark.optimised
def test_logprobs_and_those_in_a_gradient_have_the_bits_of_generation_and_ordinary_ones_do_not():
    """A kind of model with norms of both outputs, soft caps and a sliding window."""
    cfg = in_dtype("gemma2", "bfloat16")
    texts = generated(cfg, 8)
    assert num_differing(forward(cfg, texts.first(3)), texts.first(3)) == 0
    assert num_differing(in_gradient(cfg, texts), texts) == 0
    assert num_differing(ordinary(cfg, texts), texts) > 0


@pytest.mark.optimised
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CFGS)
def test_logprobs_of_every_kind_of_layer_have_the_bits_of_generation_among_any_rows_with_remat_or_not(kind, dtype):
    cfg = in_dtype(kind, dtype)
    texts = generated(cfg, 128)
    few = generated(cfg, 8)
    assert num_differing(forward(cfg, texts), texts) == 0
    assert [num_differing(forward(cfg, few.first(n)), few.first(n)) for n in (1, 3, 8)] == [0, 0, 0]
    assert num_differing(in_gradient(cfg, texts), texts) == 0
    assert num_differing(in_gradient(cfg, texts, remat=True), texts) == 0
    assert num_differing(ordinary(cfg, texts), texts) > 0
