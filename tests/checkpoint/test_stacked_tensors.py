"""A name table with two `{}`, made up for a layer of experts: many tensors make up one weight, in both directions."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detspec.checkpoint.families.family import LLAMA_NAMES
from detspec.checkpoint.files import Problems, read_headers, write_tensors
from detspec.checkpoint.hf import check_tensors, read_params
from detspec.checkpoint.tensors import named_tensors, stored_tensors
from detspec.config import ModelConfig
from detspec.model.dense import dense_config
from detspec.model.params import Params, init_params, param_shapes
from detspec.model.rows import RowOps
from detspec.model.weights import Experts, Weights, weight

CFG = dense_config(
    vocab_size=8,
    d_model=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    d_ff=16,
    tie_embeddings=True,
    dtype="float32",
)
DOWN = "model.layers.{}.mlp.experts.{}.down_proj.weight"
NAMES = {**LLAMA_NAMES, DOWN: ("layers", "{}", "experts", "down")}


@dataclasses.dataclass(frozen=True)
class DownExperts:
    """Experts of which only a part is there."""

    num: int

    def weights(self, cfg: ModelConfig) -> Weights:
        return {"experts": {"down": weight("E D F", {"D": cfg.d_model, "F": 16}, experts=Experts(self.num, active=1))}}

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        raise NotImplementedError


def with_experts(num: int) -> ModelConfig:
    """Layer 0 is dense; layer 1 has `num` experts instead."""
    layer = CFG.layer(0)
    return dataclasses.replace(CFG, kinds=(layer, dataclasses.replace(layer, ff=DownExperts(num))), pattern=(0, 1))


OF_EXPERTS = with_experts(3)


def write(folder: Path, params: Params) -> Path:
    folder.mkdir()
    write_tensors(folder, named_tensors(NAMES, params), None)
    return folder


def read(folder: Path, dtype: str = "float32") -> tuple[Params, list[str]]:
    """The weights, and what is wrong with them."""
    problems = Problems(folder)
    headers = read_headers(folder, problems)
    shapes = param_shapes(dataclasses.replace(OF_EXPERTS, dtype=dtype))
    wanted = stored_tensors(NAMES, shapes)
    check_tensors(wanted, headers, problems)
    return ({} if problems else read_params(folder, wanted, shapes, headers, problems)), list(problems)


@pytest.fixture
def params() -> Params:
    return init_params(OF_EXPERTS, jax.random.key(0))


def test_each_expert_has_a_tensor_of_its_own(params):
    tensors = named_tensors(NAMES, params)
    assert [name for name in tensors if "experts" in name] == [DOWN.format(1, expert) for expert in range(3)]
    stacked = np.asarray(params["layers"][1]["experts"]["down"])
    assert stacked.shape == (3, 8, 16)
    for expert in range(3):
        assert (tensors[DOWN.format(1, expert)] == stacked[expert]).all()
        stored = stored_tensors(NAMES, params)[DOWN.format(1, expert)]
        assert (stored.paths, stored.part, stored.shape) == ((("layers", 1, "experts", "down"),), expert, (8, 16))
    assert (stacked[0] != stacked[1]).any()


def test_round_trip_returns_every_bit_and_the_same_file(params, tmp_path):
    folder = write(tmp_path / "first", params)
    loaded, problems = read(folder)
    assert problems == []
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), loaded, params)
    assert all(jax.tree.leaves(same))
    again = write(tmp_path / "second", loaded) / "model.safetensors"
    assert again.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_experts_that_change_places_are_another_model(params, tmp_path):
    folder = write(tmp_path / "model", params)
    tensors = load_file(folder / "model.safetensors")
    first, last = DOWN.format(1, 0), DOWN.format(1, 2)
    tensors[first], tensors[last] = tensors[last], tensors[first]
    save_file(tensors, folder / "model.safetensors")
    down = np.asarray(read(folder)[0]["layers"][1]["experts"]["down"])
    assert (down == np.asarray(params["layers"][1]["experts"]["down"])[::-1]).all()


def test_experts_are_cast_and_go_to_the_sharding_of_their_weight(params, tmp_path):
    folder = write(tmp_path / "model", params)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    shapes = param_shapes(dataclasses.replace(OF_EXPERTS, dtype="bfloat16"), sharding=sharding)
    headers = read_headers(folder, Problems(folder))
    down = read_params(folder, stored_tensors(NAMES, shapes), shapes, headers, Problems(folder))["layers"][1]["experts"]["down"]
    assert down.sharding == sharding
    assert (np.asarray(down) == np.asarray(params["layers"][1]["experts"]["down"]).astype("bfloat16")).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: array.T, "has shape [16, 8], the config asks for [8, 16]"),
        (lambda array: array[:, :8], "has shape [8, 8], the config asks for [8, 16]"),
        (lambda array: array + np.float32(np.inf), "holds NaN or infinite weights as float32"),
        (lambda array: array * np.float32(np.nan), "holds NaN or infinite weights as float32"),
        (None, "[8, 16] is missing"),
    ],
    ids=["transposed", "cut", "infinite", "nan", "missing"],
)
def test_expert_that_is_wrong_is_named(params, tmp_path, change, message):
    folder, name = write(tmp_path / "model", params), DOWN.format(1, 1)
    tensors = load_file(folder / "model.safetensors")
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, folder / "model.safetensors")
    assert read(folder)[1] == [f"tensor {name} {message}"]


def test_expert_beyond_the_declared_ones_is_refused(params, tmp_path):
    folder = write(tmp_path / "model", params)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, DOWN.format(1, 3): tensors[DOWN.format(1, 2)]}, folder / "model.safetensors")
    assert "experts.3.down_proj.weight [8, 16] is not part of the model" in read(folder)[1][0]
