"""Small quantized models, written by the libraries that define their formats and read back by transformers."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from cases import build
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

Quantize = Callable[[torch.Tensor], dict[str, torch.Tensor]]  # a matrix -> the tensors that it is stored as
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def of_fp8(**changes: Any) -> tuple[dict[str, Any], Quantize]:
    """transformers' own quantizer of FP8 in blocks, as of DeepSeek and Qwen."""
    config = transformers.FineGrainedFP8Config(**changes)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        stored = quantizer.convert({"weight": weight})
        assert stored["weight"].dtype == torch.float8_e4m3fn
        return stored

    return config.to_dict(), quantize


def of_static_fp8() -> tuple[dict[str, Any], Quantize]:
    """A scale for each tensor without an axis, and one of activations, as Ministral 3 has them."""
    config, quantize = of_fp8(weight_block_size=None, activation_scheme="static")

    def with_activations(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        stored = quantize(weight)
        return {**stored, "weight_scale_inv": stored["weight_scale_inv"].reshape(()), "activation_scale": torch.tensor(3.5)}

    return config, with_activations


def of_compressed_tensors(
    name: str, dtype_of_scales: torch.dtype, status: str = "compressed", **args: Any
) -> tuple[dict[str, Any], Quantize]:
    """The compressor `name` of compressed-tensors, with scales by its own rule from minimum and maximum."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=name)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=name, ignore=["lm_head"], quantization_status=status)

    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        outs, ins = weight.shape
        rows, columns = {
            "tensor": (outs, ins),
            "channel": (1, ins),
            "group": (1, weights.group_size),
            "block": weights.block_structure,
        }[weights.strategy]
        groups = weight.reshape(outs // rows, rows, ins // columns, columns)
        scale, zeros = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), weights)
        state = {"weight": weight, "weight_scale": scale.to(dtype_of_scales), "weight_zero_point": zeros.to(torch.int8)}
        if weights.strategy == "tensor":
            state = {key: tensor.reshape(1) if key != "weight" else tensor for key, tensor in state.items()}
        return BaseCompressor.get_value_from_registry(name).compress(state, scheme)

    return json.loads(json.dumps(config.to_dict(), default=str)), quantize


F32, BF16 = torch.float32, torch.bfloat16
CASES: dict[str, Callable[[], tuple[dict[str, Any], Quantize]]] = {
    "fp8_blocks": of_fp8,
    "fp8_powers_of_two": lambda: of_fp8(scale_fmt="ue8m0", weight_block_size=(64, 128)),
    "fp8_static": of_static_fp8,
    "int8_channel": lambda: of_compressed_tensors("int-quantized", BF16, num_bits=8, strategy="channel"),
    "int8_channel_zeros": lambda: of_compressed_tensors("int-quantized", F32, num_bits=8, strategy="channel", symmetric=False),
    "int8_packed": lambda: of_compressed_tensors("pack-quantized", BF16, num_bits=8, strategy="channel"),
    "float8_channel": lambda: of_compressed_tensors("float-quantized", BF16, num_bits=8, type="float", strategy="channel"),
    "float8_tensor": lambda: of_compressed_tensors("float-quantized", F32, num_bits=8, type="float", strategy="tensor"),
    "float8_frozen": lambda: of_compressed_tensors(
        "naive-quantized", BF16, "frozen", num_bits=8, type="float", strategy="tensor"
    ),
    "float8_blocks": lambda: of_compressed_tensors(
        "float-quantized", F32, num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "int4_groups": lambda: of_compressed_tensors("pack-quantized", BF16, num_bits=4, strategy="group", group_size=32),
    "int4_groups_zeros": lambda: of_compressed_tensors(
        "pack-quantized", torch.float16, num_bits=4, strategy="group", group_size=128, symmetric=False
    ),
    "mxfp4": lambda: of_compressed_tensors(
        "mxfp4-pack-quantized", F32, num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
}


def write(case: str, folder: Path) -> None:
    """Writes a random Qwen3 whose layers are quantized; embedding, norms and head are plain."""
    model = build("qwen3", **SIZES, tie_word_embeddings=False)
    model.save_pretrained(folder)
    config, quantize = CASES[case]()
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in name:
            layer = name.removesuffix("weight")
            tensors |= {layer + suffix: part.contiguous() for suffix, part in quantize(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": config}))


def read(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers dequantizes it."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    configs = {"fp8": transformers.FineGrainedFP8Config, "compressed-tensors": transformers.CompressedTensorsConfig}
    with warnings.catch_warnings(action="ignore"):  # it says that the folder's config counts, but for `dequantize`
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=configs[method](dequantize=True), attn_implementation="eager"
        ).eval()
