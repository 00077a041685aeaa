"""Encoders of every quantized format, written apart from the decoders: random stored tensors and the matrix that they mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from detspec.checkpoint.folder import write_json
from detspec.checkpoint.hf import save_hf
from detspec.config import ModelConfig
from detspec.model.dense import with_fields
from detspec.model.params import param_shapes
from tests.checkpoint.test_hf import TINY

CFG = with_fields(TINY, d_model=32, d_ff=72)  # 72 is no multiple of MXFP4's 32 nor of the blocks below
Stored = dict[str, np.ndarray]
Encode = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output whose number comes next in a word, from the lowest bits on
GROUP = 8


def pack(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Unsigned numbers of the last axis in words of 32 bits; missing ones at the end are 0."""
    per_word = 32 // bits
    padded = np.pad(numbers.astype(np.uint64), [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per_word)])
    fields = padded.reshape(*padded.shape[:-1], -1, per_word)
    words = sum(fields[..., field] << np.uint64(bits * place) for place, field in enumerate(order or range(per_word)))
    return np.asarray(words).astype(np.uint32).view(np.int32)


def each(values: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    """The value of the group of every number, float64."""
    out, into = np.indices(shape)
    return values.astype(np.float64)[out // rows, into // columns]


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(rng.uniform(0.01, 0.03, shape)).astype(dtype)


def rounded(exact: np.ndarray, dtype: Any) -> np.ndarray:
    return exact.astype(dtype).astype(np.float32)


def e4m3(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes that are no NaN, and what they mean: a sign, four bits of exponent, three of mantissa."""
    codes = rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 7), (codes >> 3) & 15, codes & 7
    small, usual = mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    return codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn), sign * np.where(exponent == 0, small, usual)


def fp8(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
    weight, numbers = e4m3(rng, (outs, ins))
    inverse = scales(rng, (-(-outs // 12), -(-ins // 10)))
    return {"weight": weight, "weight_scale_inv": inverse}, rounded(numbers * each(inverse, 12, 10, (outs, ins)), np.float32)


def fp8_tensor(scale_name: str, scale_of: np.ndarray, activation_name: str) -> Encode:
    """A scale for the tensor, of the shape and dtype of `scale_of`, and one of activations, which changes nothing."""

    def encode(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
        weight, numbers = e4m3(rng, (outs, ins))
        scale = scales(rng, scale_of.shape, scale_of.dtype)
        stored = {"weight": weight, scale_name: np.asarray(scale), activation_name: np.full_like(scale_of, 3.5)}
        return stored, rounded(numbers * scale.astype(np.float64), np.float32)

    return encode


def float8_tensor(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
    weight, numbers = e4m3(rng, (outs, ins))
    scale = scales(rng, (1,), ml_dtypes.bfloat16)
    stored = {"weight": weight, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    return stored, rounded(numbers * scale.astype(np.float64), ml_dtypes.bfloat16)


def int8_channel(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
    numbers, zeros = rng.integers(-128, 128, (outs, ins)), rng.integers(-128, 128, (outs, 1))
    scale = scales(rng, (outs, 1), np.float16)
    stored = {"weight": numbers.astype(np.int8), "weight_scale": scale, "weight_zero_point": zeros.astype(np.int8)}
    return stored, rounded((numbers - zeros) * scale.astype(np.float64), np.float16)


def packed(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
    numbers, zeros = rng.integers(0, 16, (outs, ins)), rng.integers(0, 16, (outs, -(-ins // GROUP)))
    scale = scales(rng, zeros.shape, ml_dtypes.bfloat16)
    stored = {
        "weight_packed": pack(numbers, 4),
        "weight_scale": scale,
        "weight_zero_point": np.ascontiguousarray(pack(zeros.T, 4).T),
        "weight_shape": np.array([outs, ins]),
    }
    exact = (numbers - each(zeros, 1, GROUP, (outs, ins))) * each(scale, 1, GROUP, (outs, ins))
    return stored, rounded(exact, ml_dtypes.bfloat16)


def mxfp4(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
    codes, exponents = rng.integers(0, 16, (outs, ins)), rng.integers(118, 124, (outs, -(-ins // 32))).astype(np.uint8)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8]
    exact = np.where(codes < 8, sizes, -sizes) * 2.0 ** (each(exponents, 1, 32, (outs, ins)) - 127)
    stored = {"weight_packed": (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8), "weight_scale": exponents}
    return stored, exact.astype(np.float32)


def awq(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
    numbers, zeros = rng.integers(0, 16, (ins, outs)), rng.integers(0, 16, (ins // GROUP, outs))
    scale = scales(rng, zeros.shape, np.float16)
    stored = {"qweight": pack(numbers, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER), "scales": scale}
    exact = (numbers - each(zeros, GROUP, 1, (ins, outs))) * each(scale, GROUP, 1, (ins, outs))
    return stored, rounded(exact.T, np.float16)


def gptq(bits: int, is_v2: bool) -> Encode:
    def encode(rng: np.random.Generator, outs: int, ins: int) -> tuple[Stored, np.ndarray]:
        numbers, zeros = rng.integers(0, 2**bits, (ins, outs)), rng.integers(0, 2**bits, (ins // GROUP, outs))
        scale = scales(rng, zeros.shape, np.float16)
        # Version 1 subtracts one from every place of whole words, zero points of 0 among them.
        less = 0 if is_v2 else int(pack(np.ones(32 // bits, np.uint8), bits)[0])
        stored = {
            "qweight": np.ascontiguousarray(pack(numbers.T, bits).T),
            "qzeros": ((pack(zeros, bits).view(np.uint32).astype(np.int64) - less) % 2**32).astype(np.uint32).view(np.int32),
            "scales": scale,
            "g_idx": (np.arange(ins) // GROUP).astype(np.int32),
        }
        exact = (numbers - each(zeros, GROUP, 1, (ins, outs))) * each(scale, GROUP, 1, (ins, outs))
        return stored, rounded(exact.T, np.float16)

    return encode


def compressed(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    settings = {"format": name, "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **settings}


def gptq_config(bits: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False, **changes}


FORMATS: dict[str, tuple[dict[str, Any], Encode]] = {
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [12, 10], "activation_scheme": "dynamic"}, fp8),
    # AutoFP8 names no size of blocks; Ministral 3 has a null.
    "fp8_static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_tensor("weight_scale", np.zeros((), np.float32), "input_scale"),
    ),
    "fp8_null": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        fp8_tensor("weight_scale_inv", np.zeros(1, ml_dtypes.bfloat16), "activation_scale"),
    ),
    "float8_frozen": (
        {**compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"), "quantization_status": "frozen"},
        float8_tensor,
    ),
    "float8_tensor": (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), float8_tensor),
    "int8_channel": (compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False), int8_channel),
    "packed": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False), packed),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (gptq_config(4), gptq(4, is_v2=False)),
    "gptq_8": (gptq_config(8, checkpoint_format="gptq"), gptq(8, is_v2=False)),
    "gptq_v2": (gptq_config(4, checkpoint_format="gptq_v2"), gptq(4, is_v2=True)),
}


def make_quantized(
    name: str, folder: Path, cfg: ModelConfig = CFG, change: Callable[[Stored], object] = lambda tensors: None
) -> dict[str, np.ndarray]:
    """Writes a model whose layers' matrices are quantized; returns these, float32, by the names of their weights.

    `change` may alter the tensors before they are written.
    """
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype), param_shapes(cfg))
    save_hf(folder, cfg, random)
    settings, encode = FORMATS[name]
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), "quantization_config": settings})
    tensors, matrices = {}, {}
    for key, plain in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in key:
            stored, matrices[key] = encode(rng, *plain.shape)
            tensors |= {key.removesuffix("weight") + suffix: array for suffix, array in stored.items()}
        else:
            tensors[key] = plain
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return matrices
