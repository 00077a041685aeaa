"""Every family compared with Hugging Face transformers: logits at every position, with and without cache; greedy texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import CASES, greedy, token_rows, write
from cases import logits as logits_of

import detspec as ds
from detspec.cache import init_cache
from detspec.checkpoint.hf import save_hf
from detspec.draft.given import NONE
from detspec.draft.source import Drafter
from detspec.model.transformer import forward, forward_sequences
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import Windows

TOLERANCE = 2e-5  # relative to the largest logit: float32 sums in another order
NUM_NEW = 64


pass_of = jax.jit(forward, static_argnames=("cfg", "numerics"))
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A transformers model and our model, both loaded from the same files."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write(request.param, folder)
    yield theirs, ds.load(folder), folder
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
    theirs, model, _ = pair
    rows = list(token_rows(2))
    assert_close(np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(rows))[0]), logits_of(theirs, rows))


def test_logits_through_the_cache(pair):
    """In windows of 32: each lies in two pages of 16, and the last is not full."""
    theirs, model, _ = pair
    rows = list(token_rows(2))
    assert_close(cached_logits(model, rows, 32), logits_of(theirs, rows))


def test_greedy_texts(pair):
    theirs, model, _ = pair
    prompts = [row[:n] for row, n in zip(token_rows(3), (1, 30, 77), strict=True)]
    expected = [greedy(theirs, prompt, NUM_NEW) for prompt in prompts]
    sampling = ds.SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    schedule = Schedule(Numerics(page=16), Budget(48, 16))  # drafts change no bit, and are half of the program
    state = ds.generate(model.params, model.cfg, prompts, sampling, schedule=schedule, drafter=Drafter(NONE))
    found = [row[len(p) : len(p) + NUM_NEW] for row, p in zip(state.tokens.tolist(), prompts, strict=True)]
    assert found == expected


def test_folder_written_by_us_is_read_by_transformers_to_the_same_bits(pair, tmp_path):
    theirs, model, _ = pair
    save_hf(tmp_path / "ours", model.cfg, model.params, eos_ids=model.eos_ids)
    again = ds.load(tmp_path / "ours")
    assert (again.cfg, again.digest, again.eos_ids) == (model.cfg, model.digest, model.eos_ids)
    reread = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    for (name, before), (other, after) in zip(
        sorted(theirs.state_dict().items()), sorted(reread.state_dict().items()), strict=True
    ):
        assert name == other
        assert torch.equal(before, after), name
    rows = list(token_rows(1))
    np.testing.assert_array_equal(logits_of(reread, rows), logits_of(theirs, rows))
