"""Every family compared with Hugging Face transformers: logits at every position, with and without cache; greedy texts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cases import CASES, greedy_texts, token_rows, write
from cases import logits as logits_of
from safetensors.torch import load_file

import detspec as ds
from detspec.cache import init_cache
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.hf_config import family_of
from detspec.checkpoint.tensors import named_tensors
from detspec.checkpoint.which_family import find_family
from detspec.model.transformer import forward, forward_sequences
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import Windows

TOLERANCE = 2e-5  # relative to the largest logit: float32 sums in another order
PROMPT = 56
NUM_NEW = 64

pass_of = jax.jit(forward, static_argnames=("cfg", "numerics"))
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A transformers model and our model, both loaded from the same files, and greedy texts of the former after prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write(request.param, folder)
    texts = greedy_texts(theirs, list(token_rows(2, PROMPT)), NUM_NEW)
    yield theirs, ds.load(folder), folder, texts
    jax.clear_caches()  # compiled programs hold memory mappings, and a process may have 65530


def cached_logits(model: ds.Model, rows, window: int) -> np.ndarray:
    """Logits through the paged cache, with `window` positions per pass."""
    B, T = np.shape(rows)
    schedule = Schedule(Numerics(page=16), Budget(B * window, window))
    cache = init_cache(model.cfg, max_requests=B, max_len=T, numerics=schedule.numerics)
    logits = []
    for start in range(0, T, window):
        count = min(window, T - start)
        tokens = np.zeros((B, window), np.int32)
        tokens[:, :count] = np.asarray(rows)[:, start : start + count]
        windows = Windows(
            tokens=jnp.asarray(tokens),
            sequence=jnp.arange(B, dtype=jnp.int32),
            start=jnp.full(B, start, jnp.int32),
            count=jnp.full(B, count, jnp.int32),
        )
        out, cache, _ = pass_of(model.params, model.cfg, windows, cache, numerics=schedule.numerics)
        logits.append(np.asarray(out).reshape(B, window, -1)[:, :count])
    return np.concatenate(logits, axis=1)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    worst = np.abs(got - expected).max() / np.abs(expected).max()
    assert worst < TOLERANCE, f"off by {worst:.2e} of the largest logit"


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


def test_long_texts_have_their_own_factors_from_the_first_token_on(tmp_path):
    """Phi-3: texts beyond the original length of 16, whole, through the cache and generated; and a folder written anew."""
    theirs = write("phi3_longrope", tmp_path, original_max_position_embeddings=16)
    texts = greedy_texts(theirs, list(token_rows(2, PROMPT)), NUM_NEW)
    model = ds.load(tmp_path, long_texts=True)
    expected = logits_of(theirs, texts)
    assert_close(np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(texts))[0]), expected)
    assert_close(cached_logits(model, texts, 32), expected)
    engine = ds.Engine(model, ds.EngineConfig(max_requests=2, max_len=PROMPT + NUM_NEW + 16))
    outs = engine.generate(
        [text[:PROMPT] for text in np.asarray(texts).tolist()], ds.SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    )
    assert [list(out.token_ids) for out in outs] == [text[PROMPT:] for text in np.asarray(texts).tolist()]
    short = ds.load(tmp_path)
    assert short.cfg.max_position == 16
    assert np.abs(np.asarray(sequences_of(short.params, short.cfg, jnp.asarray(texts))[0]) - expected).max() > 0.01
    with pytest.raises(ds.InputError, match=r"max_len 32 exceeds the 16 positions .*long_texts=True"):
        ds.Engine(short, ds.EngineConfig(max_requests=2, max_len=32))
    for number, source in enumerate((model, short)):
        written = tmp_path / f"written{number}"
        save_hf(written, source.cfg, source.params, eos_ids=model.eos_ids)
        reread = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32, attn_implementation="eager")
        assert_close(logits_of(reread.eval(), texts), expected)
        assert ds.load(written, long_texts=True).digest == model.digest
