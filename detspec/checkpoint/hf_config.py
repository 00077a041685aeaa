"""The `config.json` of Hugging Face as a `ModelConfig`, and back; what is wrong with one is gathered in a list of problems."""

import json
import math
from typing import Any

from detspec.checkpoint.families import FAMILIES
from detspec.checkpoint.families.family import NULLABLE, PATTERN_KEYS, SIZE_FIELDS, Family, HfConfig, past_max_window_layers
from detspec.checkpoint.families.inert import INERT_KEYS
from detspec.config import DTYPES, MAX_LAYERS, ModelConfig, RopeScaling, is_count, is_number
from detspec.errors import InputError
from detspec.model.dense import dense_config, flat_fields

ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
# Name in config.json -> name in ModelConfig.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}
WINDOW_TWIN = "sliding_window_size"  # in the first configs of Gemma 2, next to the `sliding_window` that transformers reads
SLIDING_KEYS = ("sliding_window", WINDOW_TWIN, "use_sliding_window", "max_window_layers", "layer_types", *PATTERN_KEYS)
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
DTYPE_KEYS = ("dtype", "torch_dtype")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # `read_quantization` reads them


def read_fields(hf_config: HfConfig, family: Family, problems: list[str]) -> dict[str, Any]:
    """The fields of `ModelConfig` that the config gives; what is wrong with it is appended to `problems`."""
    read = {*family.fields, *family.fixed, *ROPE_KEYS, *DTYPE_KEYS, *SLIDING_KEYS, *QUANTIZATION_KEYS}
    known = {*read, *family.layer_keys, *family.inert, *INERT_KEYS}
    if unknown := {key: value for key, value in hf_config.items() if key not in known and value is not None}:
        problems.append(f"config.json: unknown keys {json.dumps(unknown)}; they may change the computation")
    hf_config = {**family.defaults, **{k: v for k, v in hf_config.items() if v is not None or k in NULLABLE}}
    for key, allowed in family.fixed.items():
        value = hf_config.get(key, allowed)
        if value != allowed and not (value == [] and allowed == {}):  # other programs write an empty object as a list
            problems.append(f"config.json: {key} = {json.dumps(value)} is not supported, only {json.dumps(allowed)}")

    values = {key: hf_config[key] for key in family.fields if key in hf_config}
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        if isinstance(values.get("hidden_size"), int) and isinstance(values["num_attention_heads"], int):
            values.setdefault("head_dim", values["hidden_size"] // max(1, values["num_attention_heads"]))
    problems += [f"config.json: {key} is missing" for key in SIZE_FIELDS if key not in values]
    fields = {field: value for key, value in values.items() for field in family.fields[key]}
    for key in (key for key in ACTIVATION_KEYS if key in values):
        fields["activation"] = ACTIVATIONS.get(str(values[key]))
        if fields["activation"] is None:
            accepted = ", ".join(ACTIVATIONS)
            problems.append(f"config.json: {key} = {json.dumps(values[key])} is not supported, only {accepted}")
    return {
        **family.traits,
        **fields,
        **read_rope(hf_config, family, problems),
        **read_sliding(hf_config, family, fields.get("num_layers"), problems),
        "dtype": read_dtype(hf_config, problems),
    }


def read_sliding(hf_config: HfConfig, family: Family, num_layers: Any, problems: list[str]) -> dict[str, Any]:
    """Which layers slide, and their window: from `layer_types`, or by the rule of the family."""
    if not is_count(num_layers) or num_layers > MAX_LAYERS or "sliding_window" in family.fixed:
        return {}  # `ModelConfig` rejects such a number
    if hf_config.get(WINDOW_TWIN, hf_config.get("sliding_window")) != hf_config.get("sliding_window"):
        twins = {key: hf_config.get(key) for key in ("sliding_window", WINDOW_TWIN)}
        problems.append(f"config.json: {json.dumps(twins)} contradict each other")
    for key in (*PATTERN_KEYS, "max_window_layers"):
        if key in hf_config and not (is_count(hf_config[key]) or hf_config[key] == 0):
            problems.append(f"config.json: {key} must be a whole number of at least 0, got {json.dumps(hf_config[key])}")
            return {}
    types = hf_config.get("layer_types")
    if types is None:
        layers = tuple(family.slides(index, hf_config) for index in range(num_layers))
    elif isinstance(types, list) and len(types) == num_layers and all(str(kind) in LAYER_TYPES for kind in types):
        layers = tuple(LAYER_TYPES[kind] for kind in types)
    else:
        problems.append(
            f"config.json: layer_types must name each of the {num_layers} layers, one of {', '.join(LAYER_TYPES)}, "
            f"got {json.dumps(types)}"
        )
        return {}
    if not any(layers):
        return {}
    switched_off = family.slides is past_max_window_layers and not hf_config.get("use_sliding_window")
    return {"sliding_layers": layers, "sliding_window": None if switched_off else hf_config.get("sliding_window")}


def read_rope(hf_config: HfConfig, family: Family, problems: list[str]) -> dict[str, Any]:
    """Rotary bases and scaling, from `rope_theta` and `rope_scaling`, or (transformers 5) from `rope_parameters`."""
    settings = [hf_config[key] for key in ("rope_parameters", "rope_scaling") if hf_config.get(key) is not None]
    if not all(isinstance(setting, dict) for setting in settings):
        problems.append(f"config.json: rope settings {json.dumps(settings)} are not JSON objects")
        return {}
    nested = [setting for setting in settings if set(setting) & set(LAYER_TYPES)]
    flat = [setting for setting in settings if setting not in nested]
    by_type = [setting[kind] for setting in nested for kind in set(setting) & set(LAYER_TYPES)]
    if not all(setting is None or isinstance(setting, dict) for setting in by_type):
        problems.append(f"config.json: rope settings {json.dumps(nested)} hold a value that is not a JSON object")
        return {}
    full = [setting["full_attention"] for setting in nested if setting.get("full_attention") is not None]
    sliding = [setting["sliding_attention"] for setting in nested if setting.get("sliding_attention") is not None]
    theta, scaling = read_rope_setting(hf_config, "rope_theta", [*flat, *full], family.rope_theta, problems)
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    if family.sliding_rope_theta is not None:
        base, other = read_rope_setting(hf_config, "rope_local_base_freq", sliding, family.sliding_rope_theta, problems)
        fields["sliding_rope_theta"] = base
        if other is not None:
            problems.append(f"config.json: rope scaling of sliding layers is not supported, got {json.dumps(sliding)}")
    elif sliding:
        problems.append(f"config.json: {family.model_type} takes no rope settings by layer type, got {json.dumps(nested)}")
    return fields


def read_rope_setting(
    hf_config: HfConfig, theta_key: str, settings: list[dict[str, Any]], default: float, problems: list[str]
) -> tuple[Any, RopeScaling | None]:
    """Rotary base and scaling of one kind of layers; where the config gives them several times, they must agree."""
    bases = [hf_config[theta_key]] if hf_config.get(theta_key) is not None else []
    scalings = []
    for setting in settings:
        rest = dict(setting)
        base = rest.pop("rope_theta", None)
        bases += [base] if base is not None else []
        scalings.append(read_rope_scaling(rest, hf_config, problems))
    if any(base != bases[0] for base in bases):
        problems.append(f"config.json: {theta_key} is given as {' and '.join(str(base) for base in bases)}")
    if any(scaling != scalings[0] for scaling in scalings):
        problems.append(f"config.json: rope settings {json.dumps(settings)} contradict each other")
    theta = bases[0] if bases else default
    if not is_number(theta) or not theta > 0:
        problems.append(f"config.json: {theta_key} must be a positive number, got {json.dumps(theta)}")
        return default, None
    return float(theta), scalings[0] if scalings else None


# By rope_type: key in config.json -> field of RopeScaling. Each type has `factor` as well.
ORIGINAL_LENGTH = {"original_max_position_embeddings": "original_max_position"}
ROPE_SCALING_FIELDS = {
    "linear": {},
    "llama3": {**ORIGINAL_LENGTH, **{name: name for name in ("low_freq_factor", "high_freq_factor")}},
    "yarn": {**ORIGINAL_LENGTH, **{name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")}},
}
YARN_MSCALES = ("mscale", "mscale_all_dim")


def read_rope_scaling(setting: dict[str, Any], hf_config: HfConfig, problems: list[str]) -> RopeScaling | None:
    """The scaling that one rope setting asks for; `setting` comes without its base."""
    rest = {key: value for key, value in setting.items() if value is not None}
    kinds = {str(rest.pop(key)) for key in ("rope_type", "type") if key in rest} or {"default"}
    kind = kinds.pop() if len(kinds) == 1 else None
    if rest.pop("partial_rotary_factor", 1.0) != 1.0 or (kind != "default" and kind not in ROPE_SCALING_FIELDS):
        accepted = ", ".join(["default", *ROPE_SCALING_FIELDS])
        problems.append(f"config.json: rope setting {json.dumps(setting)} is not supported; accepted rope types: {accepted}")
        return None
    if kind == "default" and not rest:
        return None
    names = ROPE_SCALING_FIELDS.get(kind, {})
    mscales = [rest.pop(key) for key in YARN_MSCALES if key in rest] if kind == "yarn" else []
    if not all(is_number(mscale) and mscale >= 0 for mscale in mscales):
        problems.append(
            f"config.json: rope setting {json.dumps(setting)}: {' and '.join(YARN_MSCALES)} must be numbers of at least 0"
        )
        return None
    if unknown := [key for key in rest if key not in names and (key != "factor" or kind == "default")]:
        problems.append(f"config.json: rope setting {json.dumps(setting)} has unsupported keys {', '.join(unknown)}")
        return None
    needed = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key in ("factor", *names)]
    if missing := [key for key in needed if key not in rest]:
        problems.append(f"config.json: rope setting {json.dumps(setting)} lacks {', '.join(missing)}")
        return None
    fields = {names.get(key, key): value for key, value in rest.items()}
    if "original_max_position_embeddings" in names:
        fields.setdefault("original_max_position", hf_config.get("max_position_embeddings"))
    if kind == "yarn" and is_number(fields.get("factor")):
        fields.setdefault("attention_factor", yarn_attention_factor(fields["factor"], mscales))
    try:
        return RopeScaling(kind=kind, **fields)
    except (InputError, TypeError) as error:
        problems.append(f"config.json: rope setting {json.dumps(setting)}: {error}")
        return None


def yarn_attention_factor(factor: float, mscales: list[float]) -> float:
    """`0.1 ln(factor) + 1`, or a quotient of two such terms with the weights `mscales`, as in DeepSeek's models."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return mscale(mscales[0]) / mscale(mscales[1]) if len(mscales) == 2 and all(mscales) else mscale(1.0)


def read_dtype(hf_config: HfConfig, problems: list[str]) -> str | None:
    """The dtype that the config names, or None."""
    for key in DTYPE_KEYS:
        value = hf_config.get(key)
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in DTYPES:
                problems.append(f"config.json: {key} = {json.dumps(value)} is not supported, only {', '.join(DTYPES)}")
            return name
    return None


def family_of(cfg: ModelConfig) -> Family:
    """The first family whose `config.json` can express all of `cfg`; `InputError` if no family can."""
    accepted = ", ".join(family.model_type for family in FAMILIES)
    if cfg.thinking is not None:
        raise InputError(
            f"no family of Hugging Face ({accepted}) has a thinker and a compressor, which this model has "
            "(ModelConfig.thinking): convert to our own folders, which keep the thinker and the compressor "
            "(detspec convert --to orbax)"
        )
    mixers = [kind.mixer for kind in cfg.kinds]
    if others := {getattr(mixer, "positions", "rope") for mixer in mixers} - {"rope"}:
        raise InputError(
            f"every family of Hugging Face ({accepted}) encodes positions by rotation and has no key for another way, got "
            f"Attention.positions {others.pop()!r}: convert to our own folders, which keep it "
            "(detspec convert --to orbax)"
        )
    flat = flat_fields(cfg)
    for family in FAMILIES if flat is not None else ():
        problems: list[str] = []
        fields = read_fields(describe(family, cfg), family, problems)
        if not problems and dense_config(**fields) == cfg:
            return family
    raise InputError(f"no family of Hugging Face ({accepted}) has a model like {cfg}: our own folders keep it (save_orbax)")


def describe(family: Family, cfg: ModelConfig) -> HfConfig:
    """The `config.json` of `cfg`; rotary settings are written both as transformers 4 and as transformers 5 reads them."""
    flat = flat_fields(cfg)
    assert flat is not None, cfg
    fields = {key: flat[names[0]] for key, names in family.fields.items()}
    for key in ACTIVATION_KEYS:
        if key in fields:
            fields[key] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == fields[key])
    if fields.get("query_pre_attn_scalar", 0) is None:
        fields["query_pre_attn_scalar"] = flat["head_dim"]
    rope: dict[str, Any] = {"rope_theta": flat["rope_theta"], "rope_type": "default"}
    scaling = flat["rope_scaling"]
    if scaling is not None:
        names = ROPE_SCALING_FIELDS[scaling.kind]
        scaled = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor, **scaled}
    described = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **fields,
        "rope_theta": flat["rope_theta"],
        "rope_parameters": rope,
        "dtype": cfg.dtype,
    }
    if flat["sliding_rope_theta"] is not None:
        local = {"rope_theta": flat["sliding_rope_theta"], "rope_type": "default"}
        described["rope_local_base_freq"] = flat["sliding_rope_theta"]
        described["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    elif scaling is not None:
        described["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "sliding_window" not in family.fixed:
        described |= describe_sliding(family, flat)
    return described


def describe_sliding(family: Family, flat: dict[str, Any]) -> HfConfig:
    """The config keys that say which layers slide."""
    described: HfConfig = {"sliding_window": flat["sliding_window"]}
    if "layer_types" not in family.fixed:
        kinds = {slides: kind for kind, slides in LAYER_TYPES.items()}
        described["layer_types"] = [kinds[slides] for slides in flat["sliding_layers"] or (False,) * flat["num_layers"]]
    if family.slides is past_max_window_layers:
        described["use_sliding_window"] = any(flat["sliding_layers"])
    return described
