"""Further families compared with Hugging Face transformers, in two programs each: whole sequences, and cached passes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cases import NEW, greedy, token_rows, write
from cases import logits as logits_of
from safetensors.torch import load_file
from test_families import assert_close, cached_logits, sequences_of

import detspec as ds
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.hf_config import family_of
from detspec.checkpoint.tensors import named_tensors
from detspec.checkpoint.which_family import find_family

PROMPT = 56
NUM_NEW = 64


@pytest.fixture(scope="module", params=NEW)
def pair(request, tmp_path_factory):
    """A transformers model and our model, both loaded from the same files, and greedy texts of the former after prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write(request.param, folder)
    texts = [prompt + greedy(theirs, prompt, NUM_NEW) for prompt in token_rows(2, PROMPT)]
    yield theirs, ds.load(folder), folder, texts
    jax.clear_caches()  # compiled programs hold memory mappings, and a process may have 65530


def test_logits_of_whole_sequences(pair):
    theirs, model, _, texts = pair
    assert_close(np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(texts))[0]), logits_of(theirs, texts))


def test_logits_and_greedy_choices_through_the_cache(pair):
    """In windows of 32: each lies in two pages of 16, and the last is not full."""
    theirs, model, _, texts = pair
    found = cached_logits(model, texts, 32)
    assert_close(found, logits_of(theirs, texts))
    chosen = found[:, PROMPT - 1 : -1].argmax(-1)
    np.testing.assert_array_equal(chosen, np.asarray(texts)[:, PROMPT:])


def test_folder_written_by_us_holds_the_same_bits(pair, tmp_path):
    """Under the names of its own family, and in the folder of the first family that says as much."""
    theirs, model, folder, texts = pair
    family = find_family(json.loads((folder / "config.json").read_text()), [])
    ours = named_tensors(family.tensor_names(model.cfg), model.params)
    stored = load_file(folder / "model.safetensors")
    assert ours.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), tensor.numpy(), name)

    save_hf(tmp_path / "ours", model.cfg, model.params, eos_ids=model.eos_ids)
    again = ds.load(tmp_path / "ours")
    assert (again.cfg, again.digest, again.eos_ids) == (model.cfg, model.digest, model.eos_ids)
    reread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert_close(logits_of(reread, texts), logits_of(theirs, texts))
    if family_of(model.cfg) is family:
        assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == theirs.config.model_type
        before, after = theirs.state_dict(), reread.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
