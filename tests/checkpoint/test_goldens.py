"""Models of every family as Hugging Face transformers wrote them, against what it said of them: see scripts/make_goldens.py.

The same comparison runs live, for more models, in tests/parity/.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec as ds
from detspec.cache import KVCache, init_cache
from detspec.config import ModelConfig
from detspec.model.params import Params
from detspec.model.transformer import forward, forward_sequences
from detspec.schedule import Budget, Numerics, Schedule
from detspec.state import NO_SEQUENCE, Windows

GOLDENS = sorted(path.parent for path in (Path(__file__).parent / "goldens").glob("*/golden.npz"))
ROWS = 16
SCHEDULE = Schedule(Numerics(page=16), Budget(ROWS, 1))  # no draft: what drafts do is tested in tests/generation
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")
TOLERANCE = 2e-5  # of the largest logit: float32 sums in another order


@partial(jax.jit, static_argnames="cfg")
def one_pass(params: Params, cfg: ModelConfig, windows: Windows, cache: KVCache) -> tuple[jax.Array, KVCache]:
    return forward(params, cfg, windows, cache, numerics=SCHEDULE.numerics)[:2]


@pytest.fixture(scope="module", params=GOLDENS, ids=lambda folder: folder.name)
def golden(request):
    return ds.load(request.param), np.load(request.param / "golden.npz")


def test_there_is_a_golden_of_every_family():
    assert {folder.name.split("_")[0] for folder in GOLDENS} == {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"}


def test_logits_are_those_of_transformers(golden):
    model, stored = golden
    logits = np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(stored["tokens"][None]))[0])[0]
    worst = np.abs(logits[stored["positions"]] - stored["logits"]).max() / np.abs(stored["logits"]).max()
    assert worst < TOLERANCE
    moved = np.abs(logits[stored["positions"] - 1] - stored["logits"]).max() / np.abs(stored["logits"]).max()
    assert moved > 0.1  # other positions have other logits


def test_likeliest_token_at_each_place_of_the_continuation_is_that_of_transformers(golden):
    """Over pages, in several passes: if each choice is the next token of the text, then greedy generation gives this text."""
    model, stored = golden
    num_prompt, continuation = int(stored["num_prompt"]), stored["continuation"].tolist()
    text = np.concatenate([stored["tokens"][:num_prompt], stored["continuation"]]).astype(np.int32)
    cache = init_cache(model.cfg, max_requests=1, max_len=len(text), numerics=SCHEDULE.numerics)
    chosen = []
    for start in range(0, len(text), ROWS):
        tokens = np.zeros((ROWS, 1), np.int32)
        tokens[: len(text) - start, 0] = text[start : start + ROWS]
        place = start + np.arange(ROWS, dtype=np.int32)
        is_text = place < len(text)
        windows = Windows(
            tokens=tokens,
            sequence=np.where(is_text, 0, NO_SEQUENCE).astype(np.int32),
            start=np.where(is_text, place, 0).astype(np.int32),
            count=is_text.astype(np.int32),
        )
        logits, cache = one_pass(model.params, model.cfg, windows, cache)
        chosen += np.asarray(logits).argmax(1).tolist()
    assert chosen[num_prompt - 1 : len(text) - 1] == continuation


def test_greedy_continuation_is_that_of_transformers():
    """For the family whose text varies most. That generation chooses what passes say is tested in tests/generation."""
    folder = max(GOLDENS, key=lambda folder: len(set(np.load(folder / "golden.npz")["continuation"].tolist())))
    model, stored = ds.load(folder), np.load(folder / "golden.npz")
    assert len(set(stored["continuation"].tolist())) > 8
    prompt = stored["tokens"][: int(stored["num_prompt"])].tolist()
    sampling = ds.SamplingParams(max_tokens=len(stored["continuation"]), ignore_eos=True)
    state = ds.generate(model.params, model.cfg, [prompt], sampling, schedule=SCHEDULE)
    assert state.tokens[0, len(prompt) :].tolist()[: len(stored["continuation"])] == stored["continuation"].tolist()
