"""Declared weights: shapes, first values, counts and checks follow, for layers that differ from their neighbours too."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from detspec.checkpoint.families.family import LLAMA_NAMES
from detspec.checkpoint.files import Problems, read_headers, write_tensors
from detspec.checkpoint.hf import check_tensors, read_params
from detspec.checkpoint.load import load_config
from detspec.checkpoint.orbax_folder import load_orbax, save_orbax
from detspec.checkpoint.tensors import named_tensors, stored_tensors
from detspec.config import ModelConfig, ThinkingConfig
from detspec.errors import InputError
from detspec.model.attention import Attention
from detspec.model.dense import config_from_json, config_to_json, with_fields
from detspec.model.mlp import GatedMLP
from detspec.model.params import Params, active_params, check_params, init_params, num_params, param_shapes
from detspec.model.rows import RowOps
from detspec.model.weights import Experts, Weights, weight
from tests.fakes import ALIBI_CFG, FAMILY_CFGS, LAYER_CFGS, RANDOM_CFG

THINKING = ThinkingConfig(chunk=8, in_layer=1, out_layer=2, max_thought=4, end_id=3)


@dataclasses.dataclass(frozen=True)
class MixingAttention(Attention):
    """Attention with a matrix that others have not."""

    def weights(self, cfg: ModelConfig) -> Weights:
        return {**Attention.weights(self, cfg), "value_mix": weight("H D", {"H": self.head_dim, "D": cfg.d_model})}


def uneven(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with such a matrix in its last layer alone."""
    layer = cfg.layer(-1)
    mixing = dataclasses.replace(layer, mixer=MixingAttention(**vars(layer.mixer)))
    return dataclasses.replace(cfg, kinds=(*cfg.kinds, mixing), pattern=(*cfg.pattern[:-1], len(cfg.kinds)))


UNEVEN = uneven(RANDOM_CFG)


def flat_bytes(params: Params) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


# Sums of each model's leaves, the i-th times i + 1, in the order of the flattened pytree: another order of the keys or another
# deviation gives other sums.
GOLDEN_SUMS = {
    "random": (RANDOM_CFG, 3435.67),
    "qwen3": (FAMILY_CFGS["qwen3"], 5122.09),
    "gemma3": (FAMILY_CFGS["gemma3"], 814.08),
    "alibi": (ALIBI_CFG, 3242.74),
    "tied": (dataclasses.replace(RANDOM_CFG, tie_embeddings=True), 2671.04),
    "thinking": (dataclasses.replace(RANDOM_CFG, thinking=THINKING), 14196.57),
}


@pytest.mark.parametrize(("cfg", "expected"), GOLDEN_SUMS.values(), ids=GOLDEN_SUMS)
def test_random_weights_are_those_of_earlier_versions(cfg: ModelConfig, expected: float):
    def weighted_sum(seed: int) -> float:
        leaves = jax.tree.leaves(init_params(cfg, jax.random.key(seed)))
        return sum(index * float(np.asarray(leaf, np.float64).sum()) for index, leaf in enumerate(leaves, start=1))

    # Processors may round the inverse error function differently; few numbers of bfloat16 then change, by one ulp.
    assert weighted_sum(0) == pytest.approx(expected, abs=0.1)
    assert weighted_sum(1) != pytest.approx(expected, abs=1)


def test_layer_with_a_weight_of_its_own_has_shape_first_values_and_count():
    shapes = param_shapes(UNEVEN)
    assert shapes["layers"][1]["value_mix"].shape == (16, 64)
    assert "value_mix" not in shapes["layers"][0]
    params = init_params(UNEVEN, jax.random.key(0))
    assert np.asarray(params["layers"][1]["value_mix"], np.float32).std() == pytest.approx(64**-0.5, rel=0.1)
    assert num_params(UNEVEN) == num_params(RANDOM_CFG) + 16 * 64
    assert active_params(UNEVEN) == active_params(RANDOM_CFG) + 16 * 64


def test_layer_with_a_weight_of_its_own_is_checked():
    params = init_params(UNEVEN, jax.random.key(0))
    check_params(UNEVEN, params)
    with pytest.raises(InputError, match=r"\['layers'\]\[1\]\['value_mix'\] is unknown"):
        check_params(RANDOM_CFG, params)
    with pytest.raises(InputError, match=r"\['layers'\]\[1\]\['value_mix'\] is missing"):
        check_params(UNEVEN, init_params(RANDOM_CFG, jax.random.key(0)))
    params["layers"][1]["value_mix"] = params["layers"][1]["value_mix"].T
    with pytest.raises(InputError, match=r"'value_mix'\] has shape \(64, 16\) and dtype bfloat16, the model's has \(16, 64\)"):
        check_params(UNEVEN, params)


def test_two_weights_of_one_name_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Gated(Attention):
        def weights(self, cfg: ModelConfig) -> Weights:
            return {**super().weights(cfg), "gate": weight("D", {"D": cfg.d_model})}

    layer = RANDOM_CFG.layer(0)
    cfg = dataclasses.replace(RANDOM_CFG, kinds=(dataclasses.replace(layer, mixer=Gated(**vars(layer.mixer))),))
    with pytest.raises(InputError, match="two weights of a layer are called 'gate': give that of your own kind another name"):
        param_shapes(cfg)


def test_thinker_is_a_copy_of_a_last_layer_with_a_weight_of_its_own():
    cfg = dataclasses.replace(UNEVEN, thinking=THINKING)
    params = init_params(cfg, jax.random.key(0))
    check_params(cfg, params)
    thinker, compressor = params["thinking"]["thinker"]["layer"], params["thinking"]["compressor"]["layer"]
    assert (thinker["value_mix"] == params["layers"][1]["value_mix"]).all()
    assert "value_mix" not in compressor


@dataclasses.dataclass(frozen=True)
class OwnMLP(GatedMLP):
    """An MLP with a field of its own, which has the name of a later one of another class."""

    size: int = 7


def test_json_leaves_out_later_fields_of_this_package_alone():
    layer = dataclasses.replace(RANDOM_CFG.layer(0), ff=OwnMLP(96))
    cfg = dataclasses.replace(RANDOM_CFG, kinds=(layer,), pattern=(0, 0))
    (kind,) = config_to_json(cfg)["kinds"]
    assert kind["ff"] == {"kind": "OwnMLP", "d_ff": 96, "activation": "silu", "size": 7}
    assert "sinks" not in kind["mixer"]
    assert "parallel" not in kind
    assert config_from_json(json.loads(json.dumps(config_to_json(cfg))), kinds=(OwnMLP,)) == cfg


def test_table_of_positions_is_looked_up_and_not_multiplied():
    cfg = LAYER_CFGS["learned positions"]
    looked_up = cfg.d_model * (cfg.vocab_size + cfg.max_position)
    assert active_params(cfg) == num_params(cfg) - looked_up


def test_layer_with_a_weight_of_its_own_survives_our_folders(tmp_path: Path):
    params = init_params(UNEVEN, jax.random.key(0))
    folder = save_orbax(tmp_path / "model", UNEVEN, params).result()
    has_not = r"has no layers of kind 'MixingAttention', only [\w, ]+: .*load\(path, kinds=\(MixingAttention,\)\)"
    for read in (load_orbax, load_config):
        with pytest.raises(InputError, match=has_not):
            read(folder)
    assert load_config(folder, kinds=(MixingAttention,)) == UNEVEN
    cfg, loaded, _ = load_orbax(folder, kinds=(MixingAttention,))
    assert cfg == UNEVEN
    assert flat_bytes(loaded) == flat_bytes(params)


def test_layer_with_a_weight_of_its_own_has_a_name_in_checkpoints(tmp_path: Path):
    """The name table has one line for all layers; the layers that lack the weight have no such tensor."""
    name = "model.layers.{}.value_mix.weight"
    names = {**LLAMA_NAMES, name: ("layers", "{}", "value_mix")}
    params = init_params(UNEVEN, jax.random.key(0))
    tensors = named_tensors(names, params)
    assert name.format(1) in tensors
    assert name.format(0) not in tensors
    with pytest.raises(InputError, match=r"no tensor name for the weight layers\.1\.value_mix"):
        named_tensors(LLAMA_NAMES, params)

    write_tensors(tmp_path, tensors, None)
    problems = Problems(tmp_path)
    headers, shapes = read_headers(tmp_path, problems), param_shapes(UNEVEN)
    wanted = stored_tensors(names, shapes)
    check_tensors(wanted, headers, problems)
    assert flat_bytes(read_params(tmp_path, wanted, shapes, headers, problems)) == flat_bytes(params)
    assert problems == []
    check_tensors(stored_tensors(LLAMA_NAMES, param_shapes(RANDOM_CFG)), headers, problems)
    assert problems == [
        "model.safetensors: tensor model.layers.1.value_mix.weight [16, 64] is not part of the model that the config describes"
    ]


@dataclasses.dataclass(frozen=True)
class EightExperts:
    """8 experts of which a token takes 2, and a router that multiplies each token with all of its 8 rows."""

    d_ff: int

    def weights(self, cfg: ModelConfig) -> Weights:
        taken = Experts(num=8, active=2)
        sizes = {"F": self.d_ff, "D": cfg.d_model}
        experts = {name: weight("E F D", sizes, experts=taken) for name in ("gate", "up")}
        experts["down"] = weight("E D F", sizes, experts=taken)
        return {"router": weight("E D", sizes, experts=Experts(num=8, active=8)), "experts": experts}

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        raise NotImplementedError


OF_EXPERTS = dataclasses.replace(RANDOM_CFG, kinds=(dataclasses.replace(RANDOM_CFG.layer(0), ff=EightExperts(96)),))


@pytest.mark.parametrize(("rows", "experts"), [(1, 2), (3, 6), (4, 8), (64, 8)])
def test_experts_count_as_far_as_the_tokens_of_a_pass_can_choose_them(rows: int, experts: int):
    """d_model 64, d_ff 96: an expert has 3 x 64 x 96 weights, a dense layer as many; the router adds 8 x 64."""
    expert, router, dense = 3 * 64 * 96, 8 * 64, active_params(RANDOM_CFG)
    assert num_params(OF_EXPERTS) == num_params(RANDOM_CFG) + 2 * (7 * expert + router)
    assert active_params(OF_EXPERTS, rows=rows) == dense + 2 * ((experts - 1) * expert + router)


def test_each_expert_starts_as_a_dense_layer_would():
    params = init_params(OF_EXPERTS, jax.random.key(0))
    up = np.asarray(params["layers"][0]["experts"]["up"], np.float32)
    assert up.shape == (8, 96, 64)
    np.testing.assert_allclose(up.std((1, 2)), 64**-0.5, rtol=0.05)
    assert len({expert.tobytes() for expert in up}) == 8


def test_active_weights_leave_out_what_a_pass_does_not_multiply():
    """An embedding that is not the head is looked up; the thinker and the compressor work between passes."""
    embed = 211 * 64
    assert active_params(RANDOM_CFG) == num_params(RANDOM_CFG) - embed
    tied = dataclasses.replace(RANDOM_CFG, tie_embeddings=True)
    assert active_params(tied) == num_params(tied) == active_params(RANDOM_CFG)
    assert active_params(dataclasses.replace(RANDOM_CFG, thinking=THINKING)) == active_params(RANDOM_CFG)


@pytest.mark.parametrize(
    ("axes", "experts"), [("X D", None), ("E D", None), ("F D", Experts(2, 1)), ("F E", Experts(2, 1)), ("EF D", Experts(2, 1))]
)
def test_axes_that_the_dimension_key_does_not_explain_are_refused(axes: str, experts: Experts | None):
    with pytest.raises(InputError, match=rf"letters that have a size \(D F.*got '{axes}'"):
        weight(axes, {"D": 64, "F": 96}, experts=experts)


def test_axis_of_two_letters_is_as_long_as_their_product():
    sizes = {"N": 4, "K": 2, "H": 16, "D": 64}
    assert weight("NH D", sizes).shape == (4 * 16, 64)
    assert weight("KH", sizes).shape == (2 * 16,)


def test_router_may_be_float32_in_every_model_and_the_bias_that_corrects_it_is():
    cfg = with_fields(LAYER_CFGS["shared experts"], dtype="bfloat16")
    dtypes = {name: leaf.dtype.name for name, leaf in param_shapes(cfg)["layers"][0].items()}
    assert (dtypes.pop("router_bias"), dtypes.pop("router")) == ("float32", "float32")
    assert set(dtypes.values()) == {"bfloat16"}
