"""Experts as transformers chooses them: the same numbers and weights in every layer; ties; all rows to one expert."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cases import OF_EXPERTS, logits, token_rows, write
from safetensors.torch import load_file, save_file
from test_families import assert_close, cached_logits, sequences_of

import detspec as ds
from detspec.model.experts import MixtureOfExperts
from detspec.model.rows import canonical_ops
from detspec.schedule import Numerics
from tests.checkpoint.test_hf import edit_config
from tests.fakes import RANDOM_CFG

ROUTERS = ("glm4_moe_groups", "ernie_moe", "minimax_m2", "granitemoe", "qwen2_moe", "hunyuan_moe")
ONE = 2  # the expert that all rows go to


def calls_of_experts(model: Any, rows: list[list[int]]) -> list[tuple[np.ndarray, ...]]:
    """Records the calls of each layer's experts: rows `[R, D]`, numbers and weights `[R, k]`."""
    calls: list[tuple[np.ndarray, ...]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: calls.append(tuple(map(array_of, args))))
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
    ]
    logits(model, rows)
    for hook in hooks:
        hook.remove()
    return calls


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy, in float32 if it is in bfloat16, which numpy has not."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()


@pytest.mark.parametrize("case", ROUTERS)
def test_router_chooses_and_weighs_as_in_transformers(case, tmp_path):
    theirs = write(case, tmp_path)
    model = ds.load(tmp_path)
    calls = calls_of_experts(theirs, list(token_rows(2)))
    layers = [i for i, layer in enumerate(model.cfg.layers) if isinstance(layer.ff, MixtureOfExperts)]
    assert len(calls) == len(layers) > 0
    ops = canonical_ops(model.cfg, Numerics())
    for index, (rows, ids, weights) in zip(layers, calls, strict=True):
        own_ids, own_weights = map(np.asarray, model.cfg.layer(index).ff.route(model.params["layers"][index], rows, ops))
        order, own_order = ids.argsort(-1), own_ids.argsort(-1)
        np.testing.assert_array_equal(np.take_along_axis(own_ids, own_order, -1), np.take_along_axis(ids, order, -1))
        found, expected = np.take_along_axis(own_weights, own_order, -1), np.take_along_axis(weights, order, -1)
        np.testing.assert_allclose(found, expected, rtol=2e-5)
        assert len(np.unique(ids)) > 2


@pytest.mark.parametrize("case", ["glm4_moe_groups", "ernie_moe"])
def test_float32_routers_stay_so_in_bfloat16(case, tmp_path):
    """Routers whose weights need all bits of float32 choose as in transformers; the same ones rounded do not."""
    write(case, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    rng = np.random.default_rng(5)
    for name in tensors:  # experts that differ by less than bfloat16 resolves
        if name.endswith("mlp.gate.weight"):
            alike = 0.1 * rng.standard_normal(tensors[name].shape[1]) * (1 + 2e-3 * rng.standard_normal(tensors[name].shape))
            tensors[name] = torch.tensor(alike, dtype=torch.float32)
        if "correction" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    in_bfloat16 = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **in_bfloat16).eval()
    calls = calls_of_experts(theirs, list(token_rows(2)))
    edit_config(tmp_path, dtype="bfloat16")
    model = ds.load(tmp_path)
    layers = [i for i, layer in enumerate(model.cfg.layers) if isinstance(layer.ff, MixtureOfExperts)]
    ops = canonical_ops(model.cfg, Numerics())
    assert len(calls) == len(layers) > 0
    shares = []  # of rows that choose otherwise, as it is and rounded
    for index, (rows, ids, _) in zip(layers, calls, strict=True):
        params, ff, given = model.params["layers"][index], model.cfg.layer(index).ff, jnp.asarray(rows, jnp.bfloat16)
        rounded = {**params, "router": params["router"].astype(jnp.bfloat16)}
        exact = ff.route(params, given, ops)
        less = dataclasses.replace(ff, float32_router=False).route(rounded, given, ops)
        shares.append([(np.sort(own, -1) != np.sort(ids, -1)).any(-1).mean() for own, _ in (exact, less)])
    of_exact, of_rounded = np.mean(shares, axis=0)
    assert of_exact < 0.01, "but for scores that are equal to the last places"
    assert of_rounded > 0.5


@pytest.mark.parametrize("changes", [{"score": "softmax"}, {"score": "sigmoid", "correction": True}, {"score": "chosen"}])
def test_tie_goes_to_the_lower_number(changes):
    """Experts 1, 3 and 4 have one matrix: equal scores, the largest ones. The last two of them change places: no difference."""
    experts = MixtureOfExperts(6, 2, 8, renormalised=True, **changes)
    matrix = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    matrix[[3, 4]] = matrix[1]
    rows = jnp.asarray(3 * matrix[1] + np.random.default_rng(1).standard_normal((5, 16)), jnp.float32)
    params = {"router": jnp.asarray(matrix), "router_bias": jnp.zeros(6)}
    ids, weights = experts.route(params, rows, canonical_ops(RANDOM_CFG, Numerics()))
    assert ids.tolist() == [[1, 3]] * 5
    np.testing.assert_array_equal(weights[:, 0], weights[:, 1])
    np.testing.assert_allclose(weights, 0.5, rtol=1e-6)


@pytest.mark.parametrize("case", ["glm4_moe_groups", "ernie_moe"])
def test_all_rows_may_go_to_one_expert(case, tmp_path):
    """The correction bias of the expert is larger than all scores; the last window has rows that are not used."""
    number = {"num_experts_per_tok": 1, "topk_group": 1} if case == "glm4_moe_groups" else {"moe_k": 1}
    write(case, tmp_path, **number)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in (name for name in tensors if "correction" in name):
        tensors[name] = torch.zeros_like(tensors[name])
        tensors[name][..., ONE] = 9.0
    save_file(tensors, path, metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = list(token_rows(1))
    assert {int(id) for _, ids, _ in calls_of_experts(theirs, rows) for id in np.unique(ids)} == {ONE}
    assert_close(cached_logits(ds.load(tmp_path), rows, 32), logits(theirs, rows))
    jax.clear_caches()


def test_every_router_is_among_the_cases():
    assert set(ROUTERS) <= OF_EXPERTS.keys()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, capsys):
    """GLM-4.5 has one after its last layer."""
    theirs = write("glm4_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    last = {"model.layers.3.eh_proj.weight": torch.ones(3, 4), "model.layers.3.mlp.up_proj.weight": torch.ones(5, 4)}
    save_file({**tensors, **last}, path, metadata={"format": "pt"})
    model = ds.load(tmp_path)
    rows = list(token_rows(1))
    assert_close(np.asarray(sequences_of(model.params, model.cfg, jnp.asarray(rows))[0]), logits(theirs, rows))
    assert "layers 3 are left out" in capsys.readouterr().err
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ds.InputError, match=r"tensor model\.layers\.3\..* is not part of the model"):
        ds.load(tmp_path)
