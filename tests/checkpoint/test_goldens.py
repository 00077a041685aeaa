"""Models of every family as Hugging Face transformers wrote them, against what it said of them: see scripts/make_goldens.py.

The same comparison runs live, for more models, in parity/.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detspec as ds
from detspec.model.transformer import forward_sequences
from detspec.schedule import Budget, Numerics, Schedule

GOLDENS = sorted(path.parent for path in (Path(__file__).parent / "goldens").glob("*/golden.npz"))
sequences_of = jax.jit(forward_sequences, static_argnames="cfg")
TOLERANCE = 2e-5  # of the largest logit: float32 sums in another order


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


def test_greedy_continuation_is_that_of_transformers(golden):
    model, stored = golden
    prompt = stored["tokens"][: int(stored["num_prompt"])].tolist()
    sampling = ds.SamplingParams(max_tokens=len(stored["continuation"]), ignore_eos=True)
    schedule = Schedule(Numerics(page=16), Budget(16, 1))  # no draft: what guesses do is tested in tests/generation
    state = ds.generate(model.params, model.cfg, [prompt], sampling, schedule=schedule)
    assert state.tokens[0, len(prompt) :].tolist()[: len(stored["continuation"])] == stored["continuation"].tolist()
