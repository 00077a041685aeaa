"""Integer models of further families have about the log-probabilities of the same weights in floats.

That engines and audit.c give the bits of the definition for them is said in test_model.py and test_audit_c.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.integer import spec
from detspec.integer.spec import FRACTION, Text
from detspec.model.transformer import forward_sequences
from tests.integer.models import FAMILIES, SMALL, float_params, small

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], 40)
MOST = {15: 0.03, 8: 0.04}  # root mean square of differences in nats; weights and keys in 8 bits make most of them


def logprobs(logits: np.ndarray) -> np.ndarray:
    below = logits - logits.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_logprobs_are_near_those_of_the_same_weights_in_floats(name: str):
    forward = jax.jit(lambda params, tokens: forward_sequences(params, FAMILIES[name], tokens)[0])
    expected = logprobs(np.asarray(forward(float_params(name), jnp.asarray(TOKENS)[None])[0], np.float64))
    assert expected.std() > 0.5
    for bits, most in MOST.items():
        of = small(name, bits)
        found = logprobs(Text(of.weights, of.shape).read(TOKENS) / 2.0**FRACTION)
        assert math.sqrt(np.square(found - expected).mean()) < most


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


def test_norm_of_all_heads_together_is_one_norm():
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**20), 2**20, (5, 4, 16))
    scale = spec.Scale(rng.integers(-(2**14), 2**14, 64), np.asarray(-11))
    found = spec.as_fixed(spec.normed_heads(x, scale, 42_950)).reshape(5, 64)
    assert (found == spec.as_fixed(spec.normed(x.reshape(5, 64), scale, 42_950))).all()
    apart = spec.as_fixed(spec.normed_heads(x, spec.Scale(scale.values[:16], scale.exponent), 42_950))
    assert (apart.reshape(5, 64)[:, :16] != found[:, :16]).any()
