"""Quantized folders: every weight has the bits that transformers dequantizes it to, and logits agree."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import build, logits, token_rows
from quantized_cases import CASES, SIZES, read, write
from safetensors.torch import load_file, save_file

import detspec as ds
from detspec.checkpoint.families import FAMILIES
from detspec.checkpoint.tensors import named_tensors
from detspec.model.transformer import forward_sequences

TOLERANCE = 2e-5  # relative to the largest logit: float32 sums in another order

sequences_of = jax.jit(forward_sequences, static_argnames="cfg")
names = next(family.names for family in FAMILIES if family.model_type == "qwen3")


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write(request.param, folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_the_bits_of_transformers(folder, dtype, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    theirs = read(tmp_path, getattr(torch, dtype)).to(getattr(torch, dtype)).state_dict()  # with fp8, plain ones stay as stored
    ours = named_tensors(names, ds.load(tmp_path).params)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert np.array_equal(np.asarray(ours[name]).astype(np.float32), tensor.float().numpy()), name


@pytest.mark.parametrize("case", ["fp8_blocks", "fp8_static", "float8_frozen"])
def test_folder_of_the_dequantized_model_has_the_same_digest(case, tmp_path):
    write(case, tmp_path / "quantized")
    theirs = read(tmp_path / "quantized", torch.float32)
    theirs.to(torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain").mkdir()
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    digest = ds.load(tmp_path / "quantized").digest
    assert ds.load(tmp_path / "plain").digest == digest
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    assert ds.load(tmp_path / "plain").digest != digest


def test_names_of_autofp8_have_the_same_digest(tmp_path):
    """`weight_scale` and `input_scale` without a size of blocks, which transformers does not read."""
    write("fp8_static", tmp_path / "static")
    digest = ds.load(tmp_path / "static").digest
    tensors = load_file(tmp_path / "static" / "model.safetensors")
    names = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        renamed[f"{layer}.{names.get(end, end)}"] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "static" / "model.safetensors")
    config = json.loads((tmp_path / "static" / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (tmp_path / "static" / "config.json").write_text(json.dumps(config))
    assert ds.load(tmp_path / "static").digest == digest


def test_logits_of_whole_sequences(folder):
    rows = list(token_rows(2))
    model = ds.load(folder)
    found = np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(rows))[0])
    expected = logits(read(folder, torch.float32), rows)
    plain = logits(build("qwen3", **SIZES, tie_word_embeddings=False), rows)
    worst, control = (np.abs(other - expected).max() / np.abs(expected).max() for other in (found, plain))
    assert worst < TOLERANCE
    assert control > 100 * TOLERANCE  # what quantization changed
