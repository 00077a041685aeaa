"""Models in bfloat16, whose logits are as far from those in float32 as transformers' are; and greedy texts of an engine."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import greedy, token_rows, write
from cases import logits as logits_of
from test_families import sequences_of

import detspec as ds
from detspec.checkpoint.load import cast_params

# One of each kind of layer.
KINDS = ("olmo2", "granite", "hunyuan_alpha", "glm4", "phi3_longrope", "nemotron", "gpt2", "gpt_neox")
KINDS += ("qwen2_moe", "glm4_moe_groups")
SPREAD = 1.5  # of transformers' own distance: both round in the same places but for a few


@pytest.mark.parametrize("case", KINDS)
def test_bfloat16_is_no_further_from_float32_than_transformers(case, tmp_path):
    theirs = write(case, tmp_path)
    model = ds.load(tmp_path)
    rows = list(token_rows(4))
    exact = logits_of(theirs, rows)
    cfg, params = cast_params(model.cfg, model.params, "bfloat16")
    ours = sequences_of(params, cfg, jnp.asarray(rows))[0]
    with torch.no_grad():
        rounded = copy.deepcopy(theirs).to(torch.bfloat16)(torch.tensor(rows), use_cache=False).logits.float().numpy()
    found, expected = (float(np.sqrt(np.mean((np.asarray(other, np.float32) - exact) ** 2))) for other in (ours, rounded))
    assert 0 < found < SPREAD * expected, f"{found:.3g} from float32, transformers {expected:.3g}"
    jax.clear_caches()


@pytest.mark.parametrize("case", ["gemma3", "gpt_neox", "qwen3_moe"])
def test_greedy_texts_of_an_engine(case, tmp_path):
    theirs = write(case, tmp_path)
    prompts = [row[:n] for row, n in zip(token_rows(3), (1, 30, 77), strict=True)]
    engine = ds.Engine(ds.load(tmp_path), ds.EngineConfig(max_requests=3, max_len=144))
    outs = engine.generate(prompts, ds.SamplingParams(max_tokens=64, ignore_eos=True))
    assert [list(out.token_ids) for out in outs] == [greedy(theirs, prompt, 64) for prompt in prompts]
    jax.clear_caches()
