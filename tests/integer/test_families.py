"""Integer models of further families have about the log-probabilities of the same weights in floats.

That engines and audit.c give the bits of the definition for them is said in test_model.py and test_audit_c.py.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint import families
from detspec.integer import spec
from detspec.integer.audit import AuditedText, audited_by_c, audited_by_spec, compile_audit, sha256_of, write_model
from detspec.integer.spec import FRACTION, Text
from detspec.model import fold_scales
from detspec.model.dense import with_fields
from detspec.model.fold_scales import folding
from detspec.model.integer_rows import soft_cap_of
from detspec.model.order_rotations import order_of, ordering
from detspec.model.to_integer import integer_config
from detspec.model.transformer import forward_sequences
from detspec.ops.rope import rope_frequencies
from scripts import models_page
from tests.fakes import random_model
from tests.integer.models import FAMILIES, SMALL, Both, both, float_params, small
from tests.integer.test_audit_c import changed

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], 40)
# Root mean square of differences over the deviation of log-probabilities; weights and keys in 8 bits make most of them.
MOST = {15: 0.03, 8: 0.04}


def logprobs(logits: np.ndarray) -> np.ndarray:
    below = logits - logits.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_logprobs_are_near_those_of_the_same_weights_in_floats(name: str):
    forward = jax.jit(lambda params, tokens: forward_sequences(params, FAMILIES[name], tokens)[0])
    expected = logprobs(np.asarray(forward(float_params(name), jnp.asarray(TOKENS)[None])[0], np.float64))

    def error(of: Both) -> float:
        found = logprobs(Text(of.weights, of.shape).read(TOKENS) / 2.0**FRACTION)
        return math.sqrt(np.square(found - expected).mean()) / expected.std()

    for bits, most in MOST.items():
        assert error(small(name, bits)) < most
    assert error(small("plain, tied")) > 0.5, "the control: other layers"


def test_gelu_is_near_and_is_no_silu():
    x = np.arange(-6 * 2**16, 6 * 2**16, 7)
    one = np.full((len(x), 1), 2**FRACTION)
    real = x / 2.0**FRACTION
    expected = 0.5 * real * (1 + np.tanh(math.sqrt(2 / math.pi) * (real + 0.044715 * real**3)))

    def error(activation: str) -> float:
        """The largest difference, beyond 1 relative to `x`: rows have 14 bits, and a share of the gate 15."""
        row = spec.gated(x[:, None], one, activation)
        found = row.values[:, 0] * row.mantissa * 2.0**row.exponent
        return float((np.abs(found - expected) / np.maximum(1, np.abs(real))).max())

    assert error("gelu_tanh") < 2**-13
    assert error("silu") > 0.1


@pytest.mark.parametrize("cap", [0.0625, 3.0, 30.0, 1024.0])
def test_soft_cap_is_near_tanh_and_is_no_cut(cap: float):
    given = soft_cap_of(cap)
    assert given is not None
    x = np.linspace(-4 * given.limit, 4 * given.limit, 20_001).astype(np.int64)
    expected = cap * np.tanh(x / 2.0**FRACTION / cap)
    assert np.abs(spec.soft_capped(x, given) / 2.0**FRACTION - expected).max() < 2**-13 * cap + 2**-16
    assert np.abs(np.clip(x, -given.limit, given.limit) / 2.0**FRACTION - expected).max() > 0.2 * cap


@pytest.mark.slow
def test_audit_in_c_has_the_bits_of_the_definition(cpu_kernels: None, tmp_path: Path):
    program = compile_audit(tmp_path)
    texts = [AuditedText(TOKENS[:20].tolist(), 4, temperature=temperature, seed=3) for temperature in (0.0, 0.8)]
    for name, bits in itertools.product(FAMILIES, MOST):
        of = small(name, bits)
        write_model(tmp_path / "model", of.weights, of.shape)
        found = audited_by_c([program], tmp_path / "model", texts)
        assert sha256_of(*found) == sha256_of(*(audited_by_spec(of.weights, of.shape, text) for text in texts)), (name, bits)


@pytest.mark.slow
def test_vocabulary_of_gemma_3_has_the_bits_of_the_definition_in_c(cpu_kernels: None, tmp_path: Path):
    """Sums over so many tokens have weights of two bits less, which the control forgets."""
    cfg = with_fields(FAMILIES["gemma3"], vocab_size=262_208, d_model=8, num_layers=1, sliding_layers=(True,))
    of = both(cfg, random_model(cfg))
    asked: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}, {"logprobs_mode": "processed"})
    texts = [AuditedText([5, 262_207, 17, 200_000], 1, **each) for each in asked]
    write_model(tmp_path / "model", of.weights, of.shape)
    expected = sha256_of(*(audited_by_spec(of.weights, of.shape, text) for text in texts))
    assert sha256_of(*audited_by_c([compile_audit(tmp_path)], tmp_path / "model", texts)) == expected
    other = changed(tmp_path, "raised(fall - weight_bits, 26)", "raised(fall - 28, 26)")
    assert sha256_of(*audited_by_c([other], tmp_path / "model", texts)) != expected


def test_scales_are_folded_into_weights_and_leave_the_config():
    cfg = FAMILIES["granite"]
    params = float_params("granite")
    folded = folding(cfg, {**params, "head": params["embed"]})
    ones = np.ones(3)
    assert (folded["embed"](ones) == 3.0).all()
    assert (folded["layers"][0]["o"](ones) == 0.7).all()
    assert (folded["layers"][0]["gate"](ones) == 1).all()
    assert (folded["head"](ones) == 1 / 3.0).all()
    left = integer_config(cfg)
    assert (left.embed_scale, left.logit_divisor, left.layer(0).residual_scale) == (None, None, None)
    of_gemma = folding(FAMILIES["gemma3"], {**float_params("gemma3"), "head": None})
    assert (of_gemma["layers"][0]["attn_post_norm"](ones) == 2 / 64).all()
    assert (of_gemma["embed"](ones) == 8 / 64).all()  # the root of 64, in the unit of the stream
    assert integer_config(FAMILIES["gemma3"]).norm_eps == FAMILIES["gemma3"].norm_eps / 64**2


def test_stream_beyond_16384_is_near_that_of_floats(monkeypatch: pytest.MonkeyPatch):
    cfg = FAMILIES["gemma3"]
    params = random_model(cfg)
    for layer in params["layers"]:
        layer["mlp_post_norm"] = layer["mlp_post_norm"] + 20_000
    expected = logprobs(np.asarray(forward_sequences(params, cfg, jnp.asarray(TOKENS)[None])[0][0], np.float64))

    def logits() -> np.ndarray:
        of = both(cfg, params)
        return Text(of.weights, of.shape).read(TOKENS)

    found = logprobs(logits() / 2.0**FRACTION)
    assert math.sqrt(np.square(found - expected).mean()) / expected.std() < MOST[15]
    monkeypatch.setattr(fold_scales, "UNIT", 1.0)
    assert (logits().max(-1) == spec.LIMIT).any(), "the control: texts that leave their range"


def test_order_of_rotated_places_keeps_pairs_half_a_head_apart():
    assert order_of(6, 4, interleaved=True).tolist() == [0, 2, 4, 1, 3, 5]
    assert order_of(8, 4, interleaved=False).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order_of(8, 8, interleaved=False).tolist() == list(range(8))
    mixer = FAMILIES["phi3, longrope"].layer(0).mixer
    changes = ordering(mixer, {"q": None, "k": None, "v": None})
    assert list(changes) == ["q", "k"]
    found = changes["q"](np.repeat(np.arange(16.0), 2).reshape(16, 2))
    assert found[:, 0].tolist() == [x * (1.2 if x < 12 else 1) for x in (0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15)]
    assert (found[:, 0] == found[:, 1]).all()


@pytest.mark.parametrize("name", ["phi3, longrope", "qwen2, yarn", "qwen3, yarn", "gemma3"])
def test_steps_of_rotations_are_near_the_frequencies_of_floats(name: str):
    for kind in integer_config(FAMILIES[name]).kinds:
        expected = rope_frequencies(kind.mixer.rotated, kind.mixer.rope.theta, kind.mixer.rope.scaling)
        found = np.asarray(kind.mixer.steps) * 2 * math.pi / 2**48
        assert np.allclose(found[: len(expected)], expected, rtol=1e-5)  # those of floats are float32
        assert not found[len(expected) :].any()


def test_page_says_of_each_family_whether_integers_take_it():
    """A new family must be decided on."""
    said = [
        *models_page.TAKEN_AS_INTEGERS.split(),
        *(n for names in models_page.REFUSED_AS_INTEGERS.values() for n in names.split()),
    ]
    assert sorted(said) == sorted(family.model_type for family in families.FAMILIES)


def test_norm_of_all_heads_together_is_one_norm():
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**20), 2**20, (5, 4, 16))
    scale = spec.Scale(rng.integers(-(2**14), 2**14, 64), np.asarray(-11))
    found = spec.as_fixed(spec.normed_heads(x, scale, 42_950)).reshape(5, 64)
    assert (found == spec.as_fixed(spec.normed(x.reshape(5, 64), scale, 42_950))).all()
    apart = spec.as_fixed(spec.normed_heads(x, spec.Scale(scale.values[:16], scale.exponent), 42_950))
    assert (apart.reshape(5, 64)[:, :16] != found[:, :16]).any()
