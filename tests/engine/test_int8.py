"""A model with weights in int8: one product for all passes, so drafts, batches and products change no bit; new weights."""

import dataclasses

import jax
import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import Model, load
from detspec.checkpoint.orbax_folder import save_orbax
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.model.params import fitted, num_params, param_shapes, params_bytes, quantized
from detspec.ops.linear.int8 import QTensor
from detspec.sampling_params import SamplingParams
from detspec.schedule import Budget, Numerics, Schedule
from tests.fakes import RANDOM_CFG, random_model

FULL = dataclasses.replace(RANDOM_CFG, tie_embeddings=True)
INT8 = dataclasses.replace(FULL, weights="int8")
PROMPTS = [np.random.default_rng(i).integers(0, FULL.vocab_size, 7 + 5 * i).tolist() for i in range(3)]


def engine_of(cfg, *, max_requests=3, window=4, method="none", **numerics) -> Engine:
    how = {"implementation": "cpu", "linear": "pinned", **numerics}
    config = EngineConfig(
        max_requests=max_requests,
        max_len=64,
        method=method,
        num_speculative_tokens=3,
        schedule=Schedule(Numerics(page=16, cache_dtype="bfloat16", **how), Budget(16, window)),
        compile_cache=False,
    )
    params = random_model(cfg)
    return Engine(Model(cfg, params, None, (), digest_model(cfg, params)), config)


def texts(engine: Engine, prompts=PROMPTS, **how) -> list[tuple]:
    sampling = [SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True, **how) for t in (0.0, 1.0, 0.7)]
    found = engine.generate(prompts, sampling[: len(prompts)])
    return [(one.token_ids, np.asarray(one.logprobs, np.float32).tobytes()) for one in found]


def test_tokens_and_bits_do_not_depend_on_batch_draft_or_products():
    expected = texts(engine_of(INT8))
    assert texts(engine_of(INT8, method="self")) == expected
    assert texts(engine_of(INT8, max_requests=1)) == expected
    assert texts(engine_of(INT8, linear="xla")) == expected
    assert texts(engine_of(FULL)) != expected


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
    with pytest.raises(InputError, match=r"weights must be one of \('int8',\), or None for those of the folder, got 'int4'"):
        load(weights="int4")


@pytest.mark.parametrize("save", [save_hf, save_orbax])
def test_folder_of_rounded_weights_is_refused(save, tmp_path):
    with pytest.raises(InputError, match="folders hold weights in float dtypes, and those of this model are in int8"):
        save(tmp_path / "model", INT8, {})
