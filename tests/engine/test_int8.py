"""A model with weights in int8: one product for all passes, so drafts, batches and products change no bit; new weights."""

import dataclasses

import jax
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import load
from detspec.checkpoint.orbax_folder import save_orbax
from detspec.errors import InputError
from detspec.model.params import fitted, num_params, param_shapes, params_bytes, quantized
from detspec.ops.linear.int8 import QTensor
from tests.engine.int8_engine import FULL, INT8, PROMPTS, engine_of, texts
from tests.fakes import random_model


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_prefill_may_have_its_own_program_since_all_products_are_exact(implementation):
    engine = engine_of(INT8, linear="xla", implementation=implementation)
    expected = texts(engine)
    device = engine.device
    assert not device.prefills_apart
    assert device.may_prefill_apart
    assert all(isinstance(weight, QTensor) for weight in matrices_of(device.model.params))
    device.prefills_apart = True
    assert texts(engine) == expected
    assert device.prefills_apart
    assert not engine_of(FULL, linear="xla").device.may_prefill_apart


def matrices_of(params) -> list:
    """All weights that rows are multiplied with: two axes, but for the table that tokens are looked up in."""
    leaves = jax.tree.leaves({**params, "embed": None}, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return [leaf for leaf in leaves if isinstance(leaf, QTensor) or leaf.ndim == 2]


def test_new_weights_in_floats_are_rounded_and_rounded_ones_are_taken_as_they_are():
    engine = engine_of(INT8)
    before, digest = texts(engine, PROMPTS[:1]), engine.model.digest
    doubled = jax.tree.map(lambda leaf: leaf * 2, random_model(FULL))
    engine.update_params(doubled)
    changed = texts(engine, PROMPTS[:1])
    assert changed != before
    engine.update_params(random_model(FULL))
    assert (texts(engine, PROMPTS[:1]), engine.model.digest) == (before, digest)
    engine.update_params(quantized(doubled, FULL))
    assert texts(engine, PROMPTS[:1]) == changed
    with pytest.raises(InputError, match=r"\['head'\] is unknown"):
        engine.update_params({**doubled, "head": doubled["embed"]})


def test_rounded_weights_are_those_that_the_config_declares():
    params = quantized(random_model(FULL), FULL)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), param_shapes(INT8))
    assert isinstance(params["head"], QTensor)
    assert params["embed"] is random_model(FULL)["embed"]
    jitted = jax.jit(lambda params: quantized(params, FULL))(random_model(FULL))
    assert digest_model(INT8, jitted) == digest_model(INT8, params) != digest_model(FULL, random_model(FULL))
    assert fitted(params, INT8) is params
    assert num_params(INT8) == num_params(FULL)


def test_loaded_model_is_rounded_named_by_another_digest_and_smaller():
    full, rounded = load("thinking_parity"), load("thinking_parity", weights="int8")
    assert rounded.cfg == dataclasses.replace(full.cfg, weights="int8")
    assert rounded.digest != full.digest
    assert digest_model(rounded.cfg, fitted(full.params, rounded.cfg)) == rounded.digest
    assert params_bytes(rounded.params) == params_bytes(param_shapes(rounded.cfg)) < 0.7 * params_bytes(full.params)
    with pytest.raises(InputError, match=r"weights must be one of \('int8', 'integer', 'integer8'\), or None .*, got 'int4'"):
        load(weights="int4")


@pytest.mark.parametrize("save", [save_hf, save_orbax])
def test_folder_of_rounded_weights_is_refused(save, tmp_path):
    with pytest.raises(InputError, match="folders hold weights in float dtypes, and those of this model are in int8"):
        save(tmp_path / "model", INT8, {})
