"""The `quantization_config` of a Hugging Face folder as a `Format`; what is not supported is refused by name.

Keys that say how weights were made, or how other programs run them, are known and passed over. All weights are read as
numbers of the model's dtype, and activations, keys and values are not quantized, whatever the config says of activations.
"""

import json
from collections.abc import Callable
from typing import Any

from detspec.checkpoint.hf_config import QUANTIZATION_KEYS
from detspec.checkpoint.quantized import MX_GROUP, Format, Group, awq, fp8, gptq, mxfp4, packed, whole_numbers
from detspec.config import is_count
from detspec.errors import InputError

Settings = dict[str, Any]

# Which layers are quantized is seen from the tensors: those that lists of layers leave out have plain ones.
LISTS_OF_LAYERS = {"modules_to_not_convert", "modules_to_convert", "ignore", "ignored_layers", "targets"}
FP8_KNOWN = {"quant_method", "activation_scheme", "fmt", "scale_fmt", "weight_block_size", "dequantize", "expert_dtype"}
AWQ_KNOWN = {"quant_method", "bits", "group_size", "zero_point", "version", "backend", "do_fuse", "fuse_max_seq_len"}
AWQ_KNOWN |= {"modules_to_fuse", "exllama_config"}
GPTQ_KNOWN = {"quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "pack_dtype"}
GPTQ_KNOWN |= {"is_marlin_format"}
# How GPTQ's tools made the weights, and settings of their kernels.
TOOLS_KNOWN = {"method", "meta", "lm_head", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse"}
TOOLS_KNOWN |= {"act_group_aware", "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size"}
TOOLS_KNOWN |= {"block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"}
TOOLS_KNOWN |= {"cache_block_outputs", "model_seqlen", "max_input_length", "use_cuda_fp16", "use_exllama", "disable_exllama"}
TOOLS_KNOWN |= {"exllama_config", "backend"}
COMPRESSED_KNOWN = {"quant_method", "format", "config_groups", "quantization_status", "global_compression_ratio", "version"}
COMPRESSED_KNOWN |= {"kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"}
GROUP_KNOWN = {"weights", "input_activations", "output_activations", "format"}
WEIGHTS_KNOWN = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"}
WEIGHTS_KNOWN |= {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
MXFP4_OF_EXPERTS = "it stores the experts of gpt-oss, a family that is not supported"


def read_quantization(hf_config: Settings, problems: list[str]) -> Format | None:
    """The format of the quantized matrices; None if the config names none, or one that is not supported, and a problem."""
    given = {key: hf_config[key] for key in QUANTIZATION_KEYS if hf_config.get(key) is not None}
    if not given:
        return None
    key, settings = next(iter(given.items()))
    try:
        if any(other != settings for other in given.values()):
            raise InputError(f"differs from {QUANTIZATION_KEYS[1]}, which is an older name of it")
        if not isinstance(settings, dict):
            raise InputError(f"must be a JSON object, got {json.dumps(settings)}")
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in METHODS:
            why = f" ({MXFP4_OF_EXPERTS})" if method == "mxfp4" else ""
            raise InputError(f"quant_method {json.dumps(method)} is not supported{why}; accepted: {', '.join(METHODS)}")
        return METHODS[method](settings)
    except InputError as error:
        problems.append(f"config.json: {key}: {error}")
        return None


def _read_fp8(settings: Settings) -> Format:
    _check_keys(settings, FP8_KNOWN)
    _check(settings, "fmt", None, "e4m3", "float8_e4m3fn")
    _check(settings, "scale_fmt", None, "float", "ue8m0")
    blocks: list[Group] = [(128, 128), (None, None)]  # of folders that name none, those of AutoFP8 have a scale for the tensor
    if "weight_block_size" in settings:
        blocks = [(None, None) if settings["weight_block_size"] is None else _pair(settings, "weight_block_size")]
    first, *others = (fp8(block, scale) for block in blocks for scale in ("weight_scale_inv", "weight_scale"))
    return first._replace(others=tuple(others))


def _read_awq(settings: Settings) -> Format:
    _check_keys(settings, AWQ_KNOWN | GPTQ_KNOWN | TOOLS_KNOWN)
    _check(settings, "bits", 4)
    for key in ("version", "format", "checkpoint_format"):
        _check(settings, key, None, "gemm", "GEMM")
    if settings.get("backend") == "llm-awq":
        raise InputError('backend = "llm-awq" is not supported: it has a layout of its own')
    _check_words(settings)
    return awq(_group_size(settings))


def _read_gptq(settings: Settings) -> Format:
    _check_keys(settings, GPTQ_KNOWN | TOOLS_KNOWN)
    _check(settings, "bits", 4, 8)
    _check_words(settings)
    layouts = [settings[key] for key in ("checkpoint_format", "format") if settings.get(key) is not None] or ["gptq"]
    for layout in layouts:
        if layout not in ("gptq", "gptq_v2") or layout != layouts[0]:
            raise InputError(f"the layout {json.dumps(layout)} is not supported, only gptq or gptq_v2")
    return gptq(settings["bits"], _group_size(settings), is_v2=layouts[0] == "gptq_v2")


def _read_compressed(settings: Settings) -> Format:
    _check_keys(settings, COMPRESSED_KNOWN)
    _check(settings, "quantization_status", None, "compressed", "frozen")  # both have the tensors of `format`
    _check(settings, "kv_cache_scheme", None)  # such a model was made for rounded keys and values
    _check(settings, "transform_config", None, {})
    _check(settings, "moe_sparsity_config", None)
    sparsity = settings.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise InputError(f"sparsity_config = {json.dumps(sparsity)} is not supported, only null or the format dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise InputError(f"config_groups must be a JSON object of JSON objects, got {json.dumps(groups)}")
    first, *others = (_weights_of(group, settings) for group in groups.values())
    if different := [other for other in others if other != first]:
        raise InputError(
            f"config_groups that store weights in several ways are not supported, got {json.dumps([first, *different])}"
        )
    return _compressed_format(*first)


def _weights_of(group: Settings, settings: Settings) -> tuple[str, Settings]:
    """How a group stores weights: the format, and the arguments that their numbers depend on."""
    _check_keys(group, GROUP_KNOWN)
    _check(group, "output_activations", None)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise InputError(f"a group of config_groups must quantize weights, got {json.dumps(group)}")
    _check_keys(weights, WEIGHTS_KNOWN)
    _check(weights, "dynamic", None, False)
    _check(weights, "actorder", None, False, "weight", "static")  # these two are about calibration alone
    name = group.get("format") or settings.get("format")
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "group_size": None, "block_structure": None}
    return str(name), {key: weights.get(key, default) for key, default in defaults.items()}


def _compressed_format(name: str, weights: Settings) -> Format:
    kind = weights["type"]
    bits = weights["num_bits"]
    symmetric = weights["symmetric"]
    strategy = weights["strategy"] or {None: "tensor", -1: "channel"}.get(weights["group_size"], "group")
    if not isinstance(symmetric, bool) or type(bits) is not int:
        raise InputError(f"weights must name whole num_bits and whether they are symmetric, got {json.dumps(weights)}")
    if name == "mxfp4-pack-quantized" and (kind, bits, weights["group_size"], symmetric) == ("float", 4, MX_GROUP, True):
        return mxfp4()
    groups: dict[str, Callable[[], Group]] = {
        "tensor": lambda: (None, None),
        "channel": lambda: (1, None),
        "group": lambda: (1, _group_size(weights)),
        "block": lambda: _pair(weights, "block_structure"),
    }
    if strategy not in groups:
        raise InputError(f"the strategy {json.dumps(strategy)} for weights is not supported, only {', '.join(groups)}")
    group = groups[strategy]()
    if name == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("channel", "group"):
        return packed(bits, group, symmetric)
    if name in ("int-quantized", "naive-quantized") and kind == "int" and bits == 8:
        return whole_numbers("I8", group, symmetric)
    if name in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8 and symmetric:
        return whole_numbers("F8_E4M3", group, symmetric)
    raise InputError(
        f"the format {name} with weights {json.dumps(weights)} is not supported; accepted: int-quantized with 8 bits, "
        "float-quantized with 8 bits, pack-quantized with 4 or 8 bits by channel or group, mxfp4-pack-quantized"
    )


METHODS: dict[str, Callable[[Settings], Format]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
}


def _check_words(settings: Settings) -> None:
    """Refuses what AWQ's and GPTQ's tools can do to the tensors beyond their plain layouts."""
    if settings.get("desc_act") not in (None, False):
        raise InputError("desc_act = true (act-order) is not supported: its groups are not consecutive inputs")
    _check(settings, "pack_dtype", None, "int32")
    _check(settings, "is_marlin_format", None, False)


def _check_keys(settings: Settings, known: set[str]) -> None:
    if unknown := {key: value for key, value in settings.items() if key not in known | LISTS_OF_LAYERS and value is not None}:
        raise InputError(f"unknown keys {json.dumps(unknown)}; they may change the weights")


def _check(settings: Settings, key: str, *accepted: Any) -> None:
    if not any(type(settings.get(key)) is type(value) and settings.get(key) == value for value in accepted):
        only = " or ".join(json.dumps(value) for value in accepted)
        raise InputError(f"{key} = {json.dumps(settings.get(key))} is not supported, only {only}")


def _group_size(settings: Settings) -> int | None:
    """Inputs that share a scale; None for all of them, which configs write as -1."""
    size = settings.get("group_size", 128)
    if not is_count(size) and size != -1:
        raise InputError(f"group_size must be a whole number of at least 1, or -1, got {json.dumps(size)}")
    return None if size == -1 else size


def _pair(settings: Settings, key: str) -> Group:
    pair = settings.get(key)
    if not isinstance(pair, list) or len(pair) != 2 or not all(is_count(size) for size in pair):
        raise InputError(f"{key} must be two whole numbers of at least 1, got {json.dumps(pair)}")
    return pair[0], pair[1]
