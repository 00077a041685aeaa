"""`detspec.logprobs` has the bits of generation, alone and inside of a gradient's program, and its derivatives are right.

The control of bits is the ordinary forward pass, that of gradients a derivative with one part left out.
"""

import dataclasses
import sys
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.config import ModelConfig
from detspec.environment import default_schedule
from detspec.errors import InputError
from detspec.generation.logprobs import logits, logprobs
from detspec.generation.loop import generate
from detspec.model import rows
from detspec.model.dense import with_fields
from detspec.model.experts import MixtureOfExperts
from detspec.model.params import Params
from detspec.model.transformer import forward_sequences
from detspec.sampling_params import SamplingParams
from detspec.schedule import Schedule
from tests.double import in_float64
from tests.fakes import ALIBI_CFG, FAMILY_CFGS, LAYER_CFGS, RANDOM_CFG, bits, random_model
from tests.thinking.fakes import THINKER_CFG

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
    """The default, in shorter pages and passes, which decide no bit of a row; windows of one row need no draft."""
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
    """The log-probabilities that an ordinary trainer finds."""

    return jax.jit(partial(ordinary_logprobs, cfg=cfg, texts=texts))(random_model(cfg))


def ordinary_logprobs(params: Params, cfg: ModelConfig, texts: Texts) -> jax.Array:
    logits_f32, _ = forward_sequences(params, cfg, texts.tokens)
    of_all = jax.nn.log_softmax(logits_f32 / texts.temperature[:, None, None])
    of_next = jnp.take_along_axis(of_all[:, :-1], texts.tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(of_next, ((0, 0), (1, 0)))


def num_differing(found: jax.Array, texts: Texts) -> int:
    return int((bits(found)[texts.is_new] != bits(texts.reported)[texts.is_new]).sum())


def in_dtype(kind: str, dtype: str) -> ModelConfig:
    return dataclasses.replace(CFGS[kind], dtype=dtype)


@pytest.mark.slow
@pytest.mark.optimised
def test_logprobs_and_those_in_a_gradient_have_the_bits_of_generation_and_ordinary_ones_do_not():
    """A kind of model with norms of both outputs, soft caps and a sliding window.

    The program of one text knows its temperature, by which a compiler would divide otherwise if it could.
    """
    cfg = in_dtype("gemma2", "bfloat16")
    texts = generated(cfg, 8)
    assert num_differing(forward(cfg, texts.first(1)), texts.first(1)) == 0
    assert num_differing(in_gradient(cfg, texts), texts) == 0
    assert num_differing(ordinary(cfg, texts), texts) > 0


@pytest.mark.optimised
@pytest.mark.parametrize("known", ["weights", "weights and lengths"])
def test_weights_that_are_constants_of_a_program_change_no_bit_but_would_by_scales_of_1(known, monkeypatch):
    """Scales of norms are 1 at first, and outputs of both halves of a layer go through norms before they are added."""
    cfg = in_dtype("post norms, width norms", "float32")
    texts = generated(cfg, 8)
    given = texts[:1] if known == "weights and lengths" else texts[:3]

    def with_constants() -> jax.Array:
        def found(tokens, lengths=texts.lengths, temperature=texts.temperature) -> jax.Array:
            return logprobs(random_model(cfg), cfg, tokens, lengths, temperature=temperature, schedule=schedule_of(cfg))

        return jax.jit(found)(*given)

    assert num_differing(with_constants(), texts) == 0
    monkeypatch.setattr(sys.modules[logprobs.__module__], "unknown", lambda params, *given: params)
    assert num_differing(with_constants(), texts) > 0


@pytest.mark.optimised
def test_logits_of_weights_that_are_constants_of_a_program_have_the_same_bits():
    cfg = in_dtype("post norms, width norms", "float32")
    params = random_model(cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40)).astype(np.int32)
    as_argument = jax.jit(lambda params, tokens: logits(params, cfg, tokens, schedule=schedule_of(cfg)))(params, tokens)
    constant = jax.jit(lambda tokens: logits(params, cfg, tokens, schedule=schedule_of(cfg)))(tokens)
    assert (bits(constant) == bits(as_argument)).all()


@pytest.mark.optimised
def test_frozen_scales_next_to_weights_with_a_gradient_change_no_bit():
    """Weights of the head have the gradient; texts and all other weights are constants of the program."""
    cfg = in_dtype("post norms, width norms", "float32")
    texts = generated(cfg, 8)
    frozen = random_model(cfg)

    def loss(head: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = {**frozen, "head": head}
        found = logprobs(params, cfg, *texts[:2], temperature=texts.temperature, schedule=schedule_of(cfg))
        return found.sum(), found

    (_, found), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(frozen["head"])
    assert num_differing(found, texts) == 0
    assert float(jnp.abs(grad).max()) > 0


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


# Gradients ------------------------------------------------------------------------------------------------------------------

# A weight of each kind: tables and a tied head, norms with biases, also of heads, sinks, an MLP, experts and their router.
EACH_WEIGHT = with_fields(
    RANDOM_CFG,
    dtype="float32",
    tie_embeddings=True,
    max_position=64,
    learned_positions=True,
    norm="layer",
    norm_bias=True,
    qk_norm=True,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    mlp_bias=True,
    logit_softcap=3.0,
    experts=MixtureOfExperts(8, 4, 20, score="chosen", bias=True, shared_d_ff=16, shared_gate=True),
    dense_layers=(True, False),
)
BOUND = 3e-6  # of the largest number of a weight's gradient: some fifty roundings of float32


def some_texts(cfg: ModelConfig) -> Texts:
    rng = np.random.default_rng(3)
    lengths = jnp.asarray([20, 7, 1], jnp.int32)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (3, 20)), jnp.int32)
    is_given = (np.arange(20) >= 1) & (np.arange(20) < np.asarray(lengths)[:, None])
    return Texts(tokens, lengths, jnp.asarray([0.6, 1.7, 1.0], jnp.float32), rng.standard_normal((3, 20), np.float32), is_given)


def gradient_of(found_fn, cfg: ModelConfig, texts: Texts):
    """The gradient of a sum of log-probabilities with given factors, as a function of weights."""
    factors = jnp.asarray(np.where(texts.is_new, texts.reported, 0.0))
    return jax.grad(lambda params: (found_fn(params) * factors).sum())


@cache
def gradient_in_float64(cfg: ModelConfig) -> Params:
    """The derivative of the ordinary forward pass."""
    texts = some_texts(cfg)
    return in_float64(gradient_of(partial(ordinary_logprobs, cfg=cfg, texts=texts), cfg, texts), random_model(cfg))


def largest_errors(cfg: ModelConfig, *, remat: bool = False) -> dict[str, float]:
    """For each weight the largest error of its gradient, as a share of the largest number of that."""
    texts = some_texts(cfg)

    def found(params: Params) -> jax.Array:
        return logprobs(params, cfg, *texts[:2], temperature=texts.temperature, schedule=schedule_of(cfg), remat=remat)

    grads = jax.jit(gradient_of(found, cfg, texts))(random_model(cfg))

    def error(found: jax.Array, exact: np.ndarray) -> float:
        largest = np.abs(exact).max() or 1.0  # a correction of a router has no derivative
        return float(np.abs(np.asarray(found, np.float64) - exact).max() / largest)

    errors = jax.tree.map(error, grads, gradient_in_float64(cfg))
    return {jax.tree_util.keystr(path): each for path, each in jax.tree.leaves_with_path(errors)}


@pytest.mark.slow
def test_gradient_of_each_kind_of_weight_is_that_of_float64():
    errors = largest_errors(EACH_WEIGHT)
    assert {path: error for path, error in errors.items() if not error <= BOUND} == {}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", CFGS)
def test_gradient_of_every_kind_of_layer_is_that_of_float64(kind):
    errors = largest_errors(in_dtype(kind, "float32"))
    assert {path: error for path, error in errors.items() if not error <= BOUND} == {}


@pytest.mark.slow
def test_control_gradient_without_what_goes_through_sums_of_rows_is_another(monkeypatch):
    monkeypatch.setattr(rows, "sums_with_derivative", lambda sum_row: lambda x: sum_row(jax.lax.stop_gradient(x)))
    errors = largest_errors(EACH_WEIGHT, remat=True)  # a program that no other test has
    assert errors["['layers'][0]['q']"] > 1e-3


# What is refused, and transforms ----------------------------------------------------------------------------------------------

CFG = dataclasses.replace(RANDOM_CFG, dtype="float32", max_position=64)
TOKENS = np.zeros((2, 8), np.int32)
LENGTHS = np.full(2, 8, np.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cfg": THINKER_CFG}, "does not take a model that thinks"),
        ({"cfg": dataclasses.replace(CFG, weights="int8")}, "does not take weights in int8"),
        ({"schedule": schedule_of(CFG).with_numerics(cache_dtype="int8")}, "does not take a cache in int8"),
        ({"schedule": schedule_of(CFG).with_numerics(alignment="window")}, "does not take windows that are aligned"),
        ({"tokens": TOKENS[0]}, r"tokens \[B, T\] and lengths \[B\], int32, got int32 \(8,\) and int32 \(2,\)"),
        ({"tokens": TOKENS[:1]}, r"got int32 \(1, 8\) and int32 \(2,\)"),
        ({"tokens": TOKENS[:, :0]}, r"got int32 \(2, 0\)"),
        ({"tokens": TOKENS.astype(np.float32)}, r"got float32 \(2, 8\)"),
        ({"lengths": LENGTHS.astype(np.float32)}, r"and float32 \(2,\)"),
        ({"tokens": np.zeros((2, 65), np.int32)}, "texts of 65 tokens exceed the 64 positions"),
        ({"temperature": 0.0}, r"takes a temperature above 0, for all texts or \[B\], got 0.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": np.ones(3, np.float32)}, r"got \[1.0, 1.0, 1.0\]"),
    ],
)
def test_logprobs_refuses(changed, message):
    given = {"cfg": CFG, "tokens": TOKENS, "lengths": LENGTHS, **changed}
    with pytest.raises(InputError, match=message) as raised:
        logprobs({}, **given)
    assert "\n" not in str(raised.value)
