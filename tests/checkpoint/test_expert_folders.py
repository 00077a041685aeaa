"""Folders with experts: further layers are left out, biases of routers keep all their bits, experts in one tensor or many."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detspec.checkpoint.families.corrected_experts import ERNIE_MOE
from detspec.checkpoint.hf import load_hf, save_hf
from detspec.checkpoint.load import cast_params
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.experts import MixtureOfExperts
from detspec.model.params import init_params, params_bytes
from tests.checkpoint.test_hf import bits, edit_config, edit_tensors

EXPERTS = MixtureOfExperts(4, 2, 8, score="sigmoid", renormalised=True, correction=True, shared_d_ff=8, float32_router=True)
CFG = dense_config(
    32, 16, 2, 4, 2, 4, 24, experts=EXPERTS, dense_layers=(True, False), rotary_dim=2, max_position=64, dtype="bfloat16"
)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
NUMBERS = np.array([14.001, 14.002, 13.999, 14.0], np.float32)  # alike in bfloat16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    params = init_params(CFG, jax.random.key(0))
    params["layers"][1]["router_bias"] = jnp.asarray(NUMBERS)
    save_hf(tmp_path / "model", CFG, params)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "glm4_moe"
    return tmp_path / "model"


def test_bias_that_chooses_experts_is_not_rounded(folder: Path, tmp_path: Path):
    assert load_file(folder / "model.safetensors")[BIAS].tobytes() == NUMBERS.tobytes()
    cfg, params = load_hf(folder)
    assert np.asarray(params["layers"][1]["router_bias"]).tobytes() == NUMBERS.tobytes()
    assert len(set(NUMBERS.astype(jnp.bfloat16).tolist())) == 1  # what rounding would do
    _, halves = cast_params(cfg, params, "float16")
    assert halves["layers"][1]["router_bias"].dtype == jnp.float32
    assert params_bytes(halves) == params_bytes(params)


@pytest.mark.parametrize("number", [1, 2])
def test_layers_that_predict_further_tokens_are_left_out(folder: Path, number: int, capsys: pytest.CaptureFixture[str]):
    expected = bits(load_hf(folder)[1])
    assert capsys.readouterr().err == ""
    further = {f"model.layers.{2 + i}.eh_proj.weight": np.full(5, np.nan, np.float32) for i in range(number)}
    edit_tensors(folder, lambda tensors: tensors.update(further))
    with pytest.raises(InputError, match=r"model\.layers\.2\.eh_proj\.weight \[5\] is not part of the model"):
        load_hf(folder)
    edit_config(folder, num_nextn_predict_layers=number)
    assert bits(load_hf(folder)[1]) == expected
    named = " and ".join(f"layers {2 + i}" for i in range(number))
    assert f"{named} are left out ({number} tensors, 0.00 GB)" in capsys.readouterr().err
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.4.eh_proj.weight": NUMBERS}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.layers\.4\.eh_proj\.weight \[4\] is not part of the model"):
        load_hf(folder)


@pytest.mark.parametrize("number", [None, 0, -1, "2", True, 1.5, [1], 2**31 - 1, 2**60], ids=str)
def test_number_of_further_layers_that_is_hostile_changes_nothing(folder: Path, number: object):
    expected = bits(load_hf(folder)[1])
    edit_config(folder, num_nextn_predict_layers=number)
    assert bits(load_hf(folder)[1]) == expected


def test_blocks_of_ernie_that_predict_further_tokens_are_left_out():
    assert ERNIE_MOE.is_of_tower("model.mtp_block.0.mlp.up_proj.weight")
    assert not ERNIE_MOE.is_of_tower("model.layers.0.mlp.up_proj.weight")


def test_experts_of_a_layer_may_lie_in_one_tensor(folder: Path):
    """As transformers 5 writes them on demand: gate and up one after the other, `[E, 2 F, D]`."""
    expected = bits(load_hf(folder)[1])

    def put_together(tensors: dict[str, np.ndarray]) -> None:
        prefix = "model.layers.1.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        tensors.update({f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down})

    edit_tensors(folder, put_together)
    assert bits(load_hf(folder)[1]) == expected
