"""Experts of gpt-oss as they are published, in mxfp4: two weights in turns in one tensor that is not turned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detspec.checkpoint import quantized
from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.families.family import TensorNames
from detspec.checkpoint.files import Problems, read_headers
from detspec.checkpoint.hf import check_tensors, load_hf, read_hf_config, read_params, save_hf
from detspec.checkpoint.layout import in_layer
from detspec.checkpoint.quantization_config import read_quantization
from detspec.checkpoint.quantized import gather_quantized
from detspec.checkpoint.tensors import stored_tensors
from detspec.model.params import init_params


def experts_in_mxfp4(rng: np.random.Generator, num: int, outs: int, ins: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors that gpt-oss stores for experts `[E, out, in]`, and their numbers, by hand: 16 bytes for a group of 32."""
    codes = rng.integers(0, 16, (num, outs, ins // 32, 16, 2), dtype=np.uint8)
    scales = rng.integers(120, 132, (num, outs, ins // 32), dtype=np.uint8)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = (
        magnitudes[codes % 8]
        * np.where(codes < 8, np.float32(1), np.float32(-1))
        * np.exp2(scales - np.float32(127))[..., None, None]
    )
    return {"_blocks": codes[..., 0] | codes[..., 1] << 4, "_scales": scales}, numbers.reshape(num, outs, ins)


EXPERTS_NAMES: TensorNames = {
    "model.layers.{}.mlp.experts.gate_up_proj": in_layer("experts_gate", "experts_up", axis=1, turn=1, turned=True),
    "model.layers.{}.mlp.experts.down_proj": in_layer("experts_down", axis=1, turned=True),
}
GATE_UP, DOWN_PROJ = (name.format(0) for name in EXPERTS_NAMES)


def read_experts(folder: Path, tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], list[str]]:
    """The weights of 3 experts `[16, 64]`, twice, and `[64, 32]` in a folder of mxfp4, and what is wrong with it."""
    save_file(tensors, folder / "model.safetensors")
    problems = Problems(folder)
    format = read_quantization({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}}, problems)
    assert format is not None
    sizes = {"experts_gate": (3, 16, 64), "experts_up": (3, 16, 64), "experts_down": (3, 64, 32)}
    shapes = {"layers": ({name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in sizes.items()},)}
    wanted = stored_tensors(EXPERTS_NAMES, shapes)
    rows = {name: stored.shape_of_rows for name, stored in wanted.items()}
    found = gather_quantized(format, rows, read_headers(folder, problems), problems)
    if not problems:
        check_tensors(wanted, found, problems)
    return ({} if problems else read_params(folder, wanted, shapes, found, problems)["layers"][0]), list(problems)


def stored_experts() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    gate_up, both = experts_in_mxfp4(rng, 3, 32, 64)
    down, numbers = experts_in_mxfp4(rng, 3, 64, 32)
    tensors = {GATE_UP + end: tensor for end, tensor in gate_up.items()} | {
        DOWN_PROJ + end: tensor for end, tensor in down.items()
    }
    return tensors, {"experts_gate": both[:, 0::2], "experts_up": both[:, 1::2], "experts_down": numbers}


@pytest.mark.parametrize("numbers", [1, 1 << 18])
def test_experts_in_mxfp4_are_what_the_encoder_meant(tmp_path: Path, numbers: int, monkeypatch: pytest.MonkeyPatch):
    """In a folder of plain weights they are turned, `[E, in, out]`; in mxfp4 they are not."""
    monkeypatch.setattr(quantized, "PIECE_NUMBERS", numbers)
    tensors, expected = stored_experts()
    found, problems = read_experts(tmp_path, tensors)
    assert problems == []
    for name, array in expected.items():
        assert np.asarray(found[name]).tobytes() == array.astype(jnp.bfloat16).tobytes(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE_UP + "_scales"), "gate_up_proj_scales [3, 32, 2] of the format mxfp4 is missing"),
        (
            lambda tensors: tensors.update({DOWN_PROJ + "_blocks": np.zeros((3, 32, 1, 16), np.uint8)}),
            "down_proj_blocks has shape [3, 32, 1, 16], the format and the config ask for [3, 64, 1, 16]",
        ),
        (
            lambda tensors: tensors.update({DOWN_PROJ + "_scales": np.zeros((3, 64, 1), np.int8)}),
            "down_proj_scales has the dtype I8, the format has U8",
        ),
        (lambda tensors: tensors.update({DOWN_PROJ + "_scales": np.full((3, 64, 1), 255, np.uint8)}), "holds NaN or infinite"),
    ],
    ids=["missing", "shape", "dtype", "infinite"],
)
def test_experts_in_mxfp4_that_are_wrong_are_named(tmp_path: Path, change: Callable[[Any], Any], message: str):
    tensors, _ = stored_experts()
    change(tensors)
    assert any(message in problem for problem in read_experts(tmp_path, tensors)[1])


def test_folder_as_published_has_the_bits_of_its_plain_twin(tmp_path: Path):
    """The config names no dtype; attention, norms and biases are plain."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16, "num_local_experts": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "sliding_window": 8}
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **sizes, **heads, "tie_word_embeddings": False}
    packed = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    cfg = read_hf_config(tmp_path)
    params = init_params(cfg, jax.random.key(0))
    rng = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}
    for number, layer in enumerate(params["layers"]):
        gate_up, both = experts_in_mxfp4(rng, 3, 64, 64)
        down, numbers = experts_in_mxfp4(rng, 3, 64, 32)
        layer |= {"experts_gate": both[:, 0::2], "experts_up": both[:, 1::2], "experts_down": numbers}
        layer |= {name: jnp.asarray(layer[name], jnp.bfloat16) for name in ("experts_gate", "experts_up", "experts_down")}
        prefix = f"model.layers.{number}.mlp.experts."
        stored |= {f"{prefix}gate_up_proj{end}": tensor for end, tensor in gate_up.items()}
        stored |= {f"{prefix}down_proj{end}": tensor for end, tensor in down.items()}
    save_hf(tmp_path / "plain", cfg, params)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    ends = ("experts.gate_up_proj", "experts.down_proj")
    others = {name: tensor.astype(jnp.bfloat16) for name, tensor in plain.items() if not name.endswith(ends)}
    assert len(others) == len(plain) - 4
    save_file({**others, **stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, **packed}))
    assert read_hf_config(tmp_path) == cfg
    assert digest_model(*load_hf(tmp_path)) == digest_model(cfg, params) == digest_model(*load_hf(tmp_path / "plain"))
    stored["model.layers.1.mlp.experts.down_proj_blocks"][2, 63, 0, 15] ^= 1
    save_file({**others, **stored}, tmp_path / "model.safetensors")
    assert digest_model(*load_hf(tmp_path)) != digest_model(cfg, params)
