"""Quantized folders: the bits of their weights, whole and in any block, and one clear error for each way one can be wrong.

tests/parity/test_quantized.py compares folders that other libraries wrote with what transformers makes of them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint import quantized
from detspec.checkpoint.arena import Arena
from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.families.family import LLAMA_NAMES
from detspec.checkpoint.files import Header, Problems, read_headers
from detspec.checkpoint.formats import awq, gptq
from detspec.checkpoint.hf import load_hf, read_hf_config
from detspec.checkpoint.layout import in_layer
from detspec.checkpoint.quantization_config import read_quantization
from detspec.checkpoint.quantized import Format, gather_quantized
from detspec.checkpoint.shards import Source, Tensor, read_block
from detspec.checkpoint.tensors import named_tensors
from detspec.errors import InputError
from tests.checkpoint.quantizers import CFG, FORMATS, GROUP, compressed, gptq_config, make_quantized
from tests.checkpoint.test_hf import edit_config

GOLDENS = Path(__file__).parent / "goldens_quantized"
LAYER = "model.layers.1.mlp.down_proj."  # [32, 72]
BLOCKS = (((0, 32), (0, 72)), ((0, 8), (0, 72)), ((5, 6), (0, 72)), ((0, 32), (9, 18)), ((13, 31), (33, 71)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_the_encoder_meant(tmp_path: Path, name: str, dtype: str):
    matrices = make_quantized(name, tmp_path / "model")
    edit_config(tmp_path / "model", dtype=dtype)
    assert read_hf_config(tmp_path / "model").dtype == dtype
    cfg, params = load_hf(tmp_path / "model")
    tensors = named_tensors(LLAMA_NAMES, params)
    assert cfg.dtype == dtype
    assert len(matrices) == 14
    for key, expected in matrices.items():
        assert np.asarray(tensors[key]).tobytes() == expected.astype(jnp.dtype(dtype)).tobytes(), key


def test_digest_is_that_of_the_numbers_in_whatever_format(tmp_path: Path):
    """The encoders of gptq and awq draw the same numbers; that of gptq_8 others."""
    matrices = make_quantized("gptq", tmp_path / "gptq")
    make_quantized("awq", tmp_path / "awq")
    make_quantized("gptq_8", tmp_path / "other")
    make_quantized("gptq", tmp_path / "plain", change=lambda tensors: tensors.update(plain_in_place_of(tensors, matrices)))
    edit_config(tmp_path / "plain", "quantization_config")
    digests = {name: digest_model(*load_hf(tmp_path / name)) for name in ("gptq", "awq", "plain", "other")}
    assert digests["gptq"] == digests["awq"] == digests["plain"] != digests["other"]


def plain_in_place_of(tensors: dict[str, np.ndarray], matrices: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Takes what is stored for the matrices out of `tensors`, and returns what to put there instead."""
    for name in list(tensors):
        if "_proj." in name:
            del tensors[name]
    return {name: np.ascontiguousarray(matrix) for name, matrix in matrices.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_every_block_has_the_bits_of_the_whole(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    expected = make_quantized(name, tmp_path / "model")[LAYER + "weight"]
    matrix = gather(tmp_path / "model", name)[LAYER + "weight"]
    source = Source([Tensor("down", matrix, None)], (jax.ShapeDtypeStruct((32, 72), np.float32),))
    for numbers in (1, quantized.PIECE_NUMBERS):  # the smallest pieces, and one for all
        monkeypatch.setattr(quantized, "PIECE_NUMBERS", numbers)
        for block in BLOCKS:
            (array,), infinite = read_block(tmp_path / "model", source, block, Arena())
            (top, bottom), (left, right) = block
            assert array.tobytes() == expected[top:bottom, left:right].tobytes(), block
            assert infinite == []


@pytest.mark.parametrize("name", FORMATS)
def test_fused_rows_have_the_bits_of_the_whole(tmp_path: Path, name: str):
    """Cut where no word and no group ends: 5 and 27 rows of the 32."""
    expected = make_quantized(name, tmp_path / "model")[LAYER + "weight"]
    matrix = gather(tmp_path / "model", name)[LAYER + "weight"]
    layout = in_layer("q", "k")
    for cut, rows in zip(layout.cuts([(5, 72), (27, 72)]), (expected[:5], expected[5:]), strict=True):
        source = Source([Tensor("", matrix, None, layout, (cut,))], (jax.ShapeDtypeStruct(rows.shape, np.float32),))
        (array,), _ = read_block(tmp_path / "model", source, tuple((0, size) for size in rows.shape), Arena())
        assert array.tobytes() == rows.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_turns_have_the_bits_of_the_whole(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    expected = make_quantized(name, tmp_path / "model")[LAYER + "weight"].reshape(4, 2, 4, 72)
    matrix = gather(tmp_path / "model", name)[LAYER + "weight"]
    layout = in_layer("q", "k", turn=4)
    source = Source(
        [Tensor("", matrix, None, layout, layout.cuts([(16, 72)] * 2))], (jax.ShapeDtypeStruct((16, 72), np.float32),) * 2
    )
    for numbers in (1, quantized.PIECE_NUMBERS):
        monkeypatch.setattr(quantized, "PIECE_NUMBERS", numbers)
        arrays, _ = read_block(tmp_path / "model", source, ((0, 16), (0, 72)), Arena())
        assert [array.tobytes() for array in arrays] == [expected[:, i].tobytes() for i in (0, 1)]


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts_in_tensors_of_their_own_have_their_bits(tmp_path: Path, name: str):
    expected = make_quantized(name, tmp_path / "model")[LAYER + "weight"]
    matrix = gather(tmp_path / "model", name)[LAYER + "weight"]
    like = jax.ShapeDtypeStruct((2, 32, 72), np.float32)
    (array,), _ = read_block(tmp_path / "model", Source([Tensor("", matrix, 1)], (like,)), ((1, 2), (0, 32), (0, 72)), Arena())
    assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "format", "others"),
    [
        ("autoawq", awq(32), [awq(48), gptq(4, 32, is_v2=True)]),
        ("autogptq_4", gptq(4, 32, is_v2=False), [gptq(4, 32, is_v2=True), gptq(4, 48, is_v2=False)]),
        ("autogptq_8", gptq(8, 32, is_v2=False), [gptq(8, 32, is_v2=True)]),
    ],
)
def test_matrices_packed_by_their_libraries_have_the_bits_that_these_give(name: str, format: Format, others: list[Format]):
    """See scripts/make_quantized_goldens.py. Other groups, orders and zero points give other numbers or do not fit."""
    stored = dict(np.load(GOLDENS / f"{name}.npz"))
    expected = stored.pop("dequantized").astype(np.float32)
    assert expected.shape == (64, 96)
    assert {key: stored[key].shape for key in format.parts} == {
        key: part.stored_shape((64, 96)) for key, part in format.parts.items()
    }
    tensors = {key: array.T for key, array in stored.items()}
    assert format.dequantize(tensors, (64, 96)).tobytes() == expected.tobytes()
    for other in others:
        try:
            assert other.dequantize(tensors, (64, 96)).tobytes() != expected.tobytes()
        except ValueError as error:
            assert "broadcast" in str(error)  # noqa: PT017


def gather(folder: Path, name: str) -> dict[str, Any]:
    """The headers of the folder, its quantized matrices as one each."""
    problems = Problems(folder)
    format = read_quantization({"quantization_config": FORMATS[name][0]}, problems)
    headers = read_headers(folder, problems)
    assert format is not None
    found = gather_quantized(format, {LAYER + "weight": (CFG.d_model, CFG.layer(0).ff.d_ff)}, headers, problems)
    assert problems == []
    return found


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize(
    ("settings", "shape", "is_read"),
    [
        ({}, (2, 3), True),
        ({}, (), True),
        ({}, (1,), True),
        ({}, (256, 1), False),
        ({"weight_block_size": None}, (), True),
        ({"weight_block_size": None}, (2, 3), False),
        ({"weight_block_size": [128, 128]}, (2, 3), True),
        ({"weight_block_size": [128, 128]}, (), False),
        ({"weight_block_size": [64, 128]}, (4, 3), True),
    ],
)
def test_scales_of_fp8_are_those_that_the_tensors_show_and_the_config_allows(settings, shape, is_read, scale):
    problems: list[str] = []
    format = read_quantization({"quantization_config": {"quant_method": "fp8", **settings}}, problems)
    assert format is not None
    headers = {"a.weight": Header("", (256, 300), "F8_E4M3", 0, 76800), f"a.{scale}": Header("", shape, "F32", 76800, 4)}
    found = gather_quantized(format, {"a.weight": (256, 300)}, headers, problems)
    assert list(found) == ["a.weight"]
    assert (problems == []) == is_read
    if not is_read:
        assert f"tensor a.{scale} has shape {list(shape)}, the format and the config ask for" in problems[0]


def test_scales_of_keys_and_values_are_refused_by_name(tmp_path: Path):
    scale = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    make_quantized("fp8_static", tmp_path / "model", change=lambda tensors: tensors.update(scale))
    with pytest.raises(InputError, match=r"tensor model\.layers\.0\.self_attn\.k_scale \[1\] is not part of the model"):
        load_hf(tmp_path / "model")


def test_older_name_of_the_settings_is_read():
    settings, _ = FORMATS["float8_frozen"]
    problems: list[str] = []
    assert read_quantization({"compression_config": settings}, problems) is not None
    assert read_quantization({"compression_config": settings, "quantization_config": settings}, problems) is not None
    assert problems == []
    other = {**settings, "format": "dense"}
    assert read_quantization({"compression_config": other, "quantization_config": settings}, problems) is None
    assert "quantization_config: differs from compression_config" in problems[0]


def replaced(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], object]:
    def change_tensors(tensors: dict[str, np.ndarray]) -> None:
        tensors[LAYER + suffix] = np.ascontiguousarray(change(tensors[LAYER + suffix]))

    return change_tensors


def with_nan(array: np.ndarray) -> np.ndarray:
    array.flat[-1] = np.nan
    return array


@pytest.mark.parametrize(
    ("name", "change", "culprit"),
    [
        ("fp8", lambda t: t.pop(LAYER + "weight_scale_inv"), "weight_scale_inv [3, 8] of the format fp8 is missing"),
        (
            "fp8",
            replaced("weight_scale_inv", lambda a: a.T),
            "weight_scale_inv has shape [8, 3], the format and the config ask",
        ),
        ("fp8", replaced("weight_scale_inv", with_nan), "weight holds NaN or infinite weights as float32"),
        ("fp8", replaced("weight", lambda a: a.view(np.int8)), "weight has the dtype I8, the format has F8_E4M3"),
        ("packed", replaced("weight_shape", lambda a: a + 1), "weight_shape [2] of dtype I64 must hold the 2 numbers 32 to 72"),
        ("packed", lambda t: t.pop(LAYER + "weight_packed"), "tensor model.layers.1.mlp.down_proj.weight [32, 72] is missing"),
        ("awq", replaced("qzeros", lambda a: a[1:]), "qzeros has shape [8, 4], the format and the config ask for [9, 4]"),
        ("awq", replaced("scales", lambda a: a.view(np.int16)), "scales has the dtype I16, the format has F32 or BF16 or F16"),
        ("gptq", replaced("g_idx", lambda a: a[::-1]), "g_idx [72] of dtype I32 must hold the 72 numbers 0 to 8"),
        (
            "gptq",
            lambda t: t.update({LAYER + "extra": t[LAYER + "scales"]}),
            "down_proj.extra [9, 32] is not part of the model",
        ),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, name: str, change: Callable[[dict[str, np.ndarray]], object], culprit: str):
    make_quantized(name, tmp_path / "model", change=change)
    with pytest.raises(InputError) as caught:
        load_hf(tmp_path / "model")
    assert culprit in str(caught.value)
    assert LAYER in str(caught.value)


def test_layers_with_plain_weights_stay_as_they_are(tmp_path: Path):
    """As those that a config lists as ignored are stored; the others in the folder are dequantized."""
    plain = np.full((CFG.d_model, CFG.layer(0).ff.d_ff), 0.25, np.float32)

    def leave_out(tensors: dict[str, np.ndarray]) -> None:
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[LAYER + suffix]
        tensors[LAYER + "weight"] = plain

    matrices = make_quantized("awq", tmp_path / "model", change=leave_out)
    tensors = named_tensors(LLAMA_NAMES, load_hf(tmp_path / "model")[1])
    assert (np.asarray(tensors.pop(LAYER + "weight")) == plain).all()
    assert all((np.asarray(tensors[key]) == matrix).all() for key, matrix in matrices.items() if key in tensors)


def weights_of(**changes: Any) -> dict[str, Any]:
    return compressed("pack-quantized", **{"num_bits": 4, "strategy": "group", "group_size": GROUP, **changes})


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ("awq", 'must be a JSON object, got "awq"'),
        ({"bits": 4}, "quant_method null is not supported; accepted: fp8, compressed-tensors, awq, gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 'quant_method "bitsandbytes" is not supported'),
        ({"quant_method": "hqq"}, 'quant_method "hqq" is not supported'),
        ({"quant_method": "mxfp4", "bits": 4}, 'unknown keys {"bits": 4}'),
        ({"quant_method": ["awq"]}, 'quant_method ["awq"] is not supported'),
        ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt = "e5m2" is not supported'),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'version = "gemv" is not supported'),
        ({"quant_method": "awq", "bits": True}, "bits = true is not supported, only 4"),
        (gptq_config(4, desc_act=True), "desc_act = true (act-order) is not supported"),
        (gptq_config(3), "bits = 3 is not supported, only 4 or 8"),
        (gptq_config(4, group_size=0), "group_size must be a whole number of at least 1, or -1, got 0"),
        (gptq_config(4, dynamic={"-:.*mlp.*": {}}), 'unknown keys {"dynamic": {"-:.*mlp.*": {}}}; they may change the weights'),
        (gptq_config(4, checkpoint_format="marlin"), 'the layout "marlin" is not supported'),
        (weights_of(actorder="group"), 'actorder = "group" is not supported'),
        (weights_of(strategy="tensor_group"), 'the strategy "tensor_group" for weights is not supported'),
        (weights_of(num_bits="4"), "weights must name whole num_bits"),
        ({**weights_of(), "kv_cache_scheme": {"num_bits": 8}}, 'kv_cache_scheme = {"num_bits": 8} is not supported'),
        ({**weights_of(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config = "),
        ({**weights_of(), "format": "nvfp4-pack-quantized"}, "the format nvfp4-pack-quantized with weights"),
        ({**weights_of(), "quantization_status": "initialized"}, 'quantization_status = "initialized" is not supported'),
        ({**weights_of(), "format": "marlin-24"}, "the format marlin-24 with weights"),
        ({**weights_of(), "config_groups": {"a": 1}}, "config_groups must be a JSON object of JSON objects"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings: Any, culprit: str):
    problems: list[str] = []
    assert read_quantization({"quantization_config": settings}, problems) is None
    assert len(problems) == 1
    assert problems[0].startswith("config.json: quantization_config: ")
    assert culprit in problems[0]


def test_groups_that_store_weights_in_two_ways_are_refused():
    settings = weights_of()
    settings["config_groups"]["group_1"] = weights_of(num_bits=8)["config_groups"]["group_0"]
    problems: list[str] = []
    assert read_quantization({"quantization_config": settings}, problems) is None
    assert "config_groups that store weights in several ways" in problems[0]
    settings["config_groups"]["group_1"] = weights_of(observer="mse")["config_groups"]["group_0"]
    assert read_quantization({"quantization_config": settings}, problems) is not None


def test_plain_headers_are_left_alone(tmp_path: Path):
    make_quantized("gptq", tmp_path / "model")
    found = gather(tmp_path / "model", "gptq")
    assert isinstance(found["model.embed_tokens.weight"], Header)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["bits"] == 4
