"""Spreading outliers leaves the model as it is, and keeps what activations of 8 bits would lose."""

import jax
import numpy as np
import pytest

from detspec.integer.spec import Text, block_of, hadamard
from detspec.model.fold_scales import folding
from detspec.model.spread_outliers import rotated, spreading
from scripts.measure_outliers import KINDS, loss
from tests.fakes import random_model
from tests.integer.models import CFGS, both, small

TOKENS = np.random.default_rng(0).integers(0, 211, 40)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean square of differences, over that of what is expected."""
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("n", [1, 3, 4, 96, 3 * 2**15, 2**17])
def test_hadamard_twice_is_a_multiple(n: int):
    x = np.random.default_rng(n).integers(-100, 101, (2, n))
    assert (hadamard(hadamard(x)) == block_of(n) * x).all()
    assert np.abs(hadamard(np.eye(1, n, dtype=np.int64))).sum() == block_of(n)


def test_rotation_is_its_own_inverse_by_any_axis():
    x = np.random.default_rng(0).normal(size=(6, 40))
    for axis in (0, 1):
        assert np.allclose(rotated(rotated(x, axis), axis), x, rtol=0, atol=1e-12)  # roots are rounded
        assert np.abs(rotated(x, axis) - x).max() > 0.1


@pytest.mark.parametrize("name", CFGS)
def test_model_with_outliers_spread_has_about_the_same_logits(name: str):
    """Next to activations of 15 bits. Weights are rounded in another basis; the control leaves out one of the changes."""
    expected, found = (Text(of.weights, of.shape).read(TOKENS) for of in (small(name), small(name, 8)))
    assert error(found, expected) < 0.05
    params = random_model(CFGS[name])
    changed = {**params, "final_norm": params["final_norm"].at[::2].multiply(3)}  # as if it were not folded into the head
    other = both(CFGS[name], changed, 8)
    assert error(Text(other.weights, other.shape).read(TOKENS), expected) > 0.3


def test_each_weight_has_a_change_and_norms_of_the_stream_become_ones():
    cfg = CFGS["qkv_bias, llama3"]
    params = random_model(cfg)
    changes = spreading(cfg, params, folding(cfg, params))
    assert jax.tree.structure(changes) == jax.tree.structure(params)
    layer = changes["layers"][0]
    for change in (layer["attn_norm"], layer["mlp_norm"], changes["final_norm"]):
        assert (change(np.full(8, 3.0)) == 1).all()
    assert (layer["q_bias"](np.arange(8.0)) == np.arange(8.0)).all()


@pytest.mark.slow
def test_outliers_of_256_times_cost_little_once_they_are_spread():
    """On the shipped model, with weights of 22 bits: those of 8 bits round the columns that undo the factor."""
    nats = {kind: loss(kind, 256, 22, rows=1, length=128) for kind in KINDS}
    assert nats["8 bits, spread"] - nats["15 bits"] < 0.05
    assert nats["8 bits, as they are"] - nats["15 bits"] > 1
