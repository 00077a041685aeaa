"""The `quantization_config` of a Hugging Face folder as a `Format`; what is not supported is refused by name.

Keys that say how weights were made, or how other programs run them, are known and passed over. All weights are read as
numbers of the model's dtype, and activations, keys and values are not quantized, whatever the config says of activations.
"""

import json
from collections.abc import Callable
from typing import Any

from detspec.checkpoint.formats import MX_GROUP, awq, fp8, gptq, mxfp4, mxfp4_of_experts, packed, whole_numbers
from detspec.checkpoint.hf_config import QUANTIZATION_KEYS
from detspec.checkpoint.quantized import Format, Group
from detspec.config import is_count
from detspec.errors import InputError

Settings = dict[str, Any]

# Keys that are known, of which only some values are accepted if they are named in a table below.
# Which layers are quantized is seen from the tensors: those that lists of layers leave out have plain ones.
LISTS_OF_LAYERS = "modules_to_not_convert modules_to_convert ignore ignored_layers targets"
FP8_KNOWN = "quant_method activation_scheme fmt scale_fmt weight_block_size dequantize expert_dtype"
AWQ_KNOWN = """quant_method bits group_size zero_point version backend do_fuse fuse_max_seq_len modules_to_fuse
    exllama_config"""
GPTQ_KNOWN = "quant_method bits group_size sym desc_act checkpoint_format format pack_dtype is_marlin_format"
# How GPTQ's tools made the weights, and settings of their kernels.
TOOLS_KNOWN = """method meta lm_head damp_percent damp_auto_increment static_groups true_sequential mse act_group_aware
    model_name_or_path model_file_base_name dataset tokenizer batch_size block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize pad_token_id cache_block_outputs model_seqlen
    max_input_length use_cuda_fp16 use_exllama disable_exllama exllama_config backend"""
COMPRESSED_KNOWN = """quant_method format config_groups quantization_status global_compression_ratio version kv_cache_scheme
    sparsity_config transform_config moe_sparsity_config"""
GROUP_KNOWN = "weights input_activations output_activations format"
WEIGHTS_KNOWN = """num_bits type symmetric strategy group_size block_structure dynamic actorder observer observer_kwargs
    scale_dtype zp_dtype"""

# Key -> the values that are accepted; None is a key that is left out.
Accepted = dict[str, tuple[Any, ...]]
FP8_VALUES: Accepted = {"fmt": (None, "e4m3", "float8_e4m3fn"), "scale_fmt": (None, "float", "ue8m0")}
# The plain layouts among those that AWQ's and GPTQ's tools can write.
PLAIN_VALUES: Accepted = {"pack_dtype": (None, "int32"), "is_marlin_format": (None, False)}
AWQ_VALUES: Accepted = {"bits": (4,), **dict.fromkeys(("version", "format", "checkpoint_format"), (None, "gemm", "GEMM"))}
GPTQ_VALUES: Accepted = {"bits": (4, 8)}
COMPRESSED_VALUES: Accepted = {
    "quantization_status": (None, "compressed", "frozen"),  # both have the tensors of `format`
    "kv_cache_scheme": (None,),  # a model with one was made for rounded keys and values
    "transform_config": (None, {}),
    "moe_sparsity_config": (None,),
}
GROUP_VALUES: Accepted = {"output_activations": (None,)}
# Both are about calibration alone.
WEIGHTS_VALUES: Accepted = {"dynamic": (None, False), "actorder": (None, False, "weight", "static")}


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
            raise InputError(f"quant_method {json.dumps(method)} is not supported; accepted: {', '.join(METHODS)}")
        return METHODS[method](settings)
    except InputError as error:
        problems.append(f"config.json: {key}: {error}")
        return None


def _read_fp8(settings: Settings) -> Format:
    _check(settings, FP8_KNOWN, FP8_VALUES)
    blocks: list[Group] = [(128, 128), (None, None)]  # where a folder names none: AutoFP8's have a scale for the tensor
    if "weight_block_size" in settings:
        blocks = [(None, None) if settings["weight_block_size"] is None else _pair(settings, "weight_block_size")]
    first, *others = (fp8(block, scale) for block in blocks for scale in ("weight_scale_inv", "weight_scale"))
    return first._replace(others=tuple(others))


def _read_awq(settings: Settings) -> Format:
    _check(settings, f"{AWQ_KNOWN} {GPTQ_KNOWN} {TOOLS_KNOWN}", {**AWQ_VALUES, **PLAIN_VALUES})
    _check_order(settings)
    if settings.get("backend") == "llm-awq":
        raise InputError('backend = "llm-awq" is not supported: it has a layout of its own')
    return awq(_group_size(settings))


def _read_gptq(settings: Settings) -> Format:
    _check(settings, f"{GPTQ_KNOWN} {TOOLS_KNOWN}", {**GPTQ_VALUES, **PLAIN_VALUES})
    _check_order(settings)
    layouts = [settings[key] for key in ("checkpoint_format", "format") if settings.get(key) is not None] or ["gptq"]
    for layout in layouts:
        if layout not in ("gptq", "gptq_v2") or layout != layouts[0]:
            raise InputError(f"the layout {json.dumps(layout)} is not supported, only gptq or gptq_v2")
    return gptq(settings["bits"], _group_size(settings), is_v2=layouts[0] == "gptq_v2")


def _read_compressed(settings: Settings) -> Format:
    _check(settings, COMPRESSED_KNOWN, COMPRESSED_VALUES)
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


def _read_mxfp4(settings: Settings) -> Format:
    _check(settings, "quant_method dequantize", {})
    return mxfp4_of_experts()


def _weights_of(group: Settings, settings: Settings) -> tuple[str, Settings]:
    """How a group stores weights: the format, and the arguments that their numbers depend on."""
    _check(group, GROUP_KNOWN, GROUP_VALUES)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise InputError(f"a group of config_groups must quantize weights, got {json.dumps(group)}")
    _check(weights, WEIGHTS_KNOWN, WEIGHTS_VALUES)
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
    "mxfp4": _read_mxfp4,
}


def _check_order(settings: Settings) -> None:
    if settings.get("desc_act") not in (None, False):
        raise InputError("desc_act = true (act-order) is not supported: its groups are not consecutive inputs")


def _check(settings: Settings, known: str, accepted: Accepted) -> None:
    """Refuses keys that are not `known`, and values of a key that are not those `accepted`; 1 is not True."""
    names = f"{known} {LISTS_OF_LAYERS}".split()
    if unknown := {key: value for key, value in settings.items() if key not in names and value is not None}:
        raise InputError(f"unknown keys {json.dumps(unknown)}; they may change the weights")
    for key, values in accepted.items():
        given = settings.get(key)
        if not any(type(given) is type(value) and given == value for value in values):
            only = " or ".join(json.dumps(value) for value in values)
            raise InputError(f"{key} = {json.dumps(given)} is not supported, only {only}")


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
