"""The `config.json` of Hugging Face as a `ModelConfig`, and back; what is wrong with one is gathered in a list of problems."""

import json
from typing import Any

from detspec.checkpoint.families import FAMILIES
from detspec.checkpoint.families.family import NULLABLE, PATTERN_KEYS, SWITCH, Family, Fields, HfConfig
from detspec.checkpoint.families.inert import INERT_KEYS
from detspec.checkpoint.hf_rope import LAYER_TYPES, describe_old_rope, describe_rope, read_rope, rope_keys
from detspec.config import DTYPES, MAX_LAYERS, ModelConfig, is_count
from detspec.errors import InputError
from detspec.model.dense import dense_config, flat_fields, for_long_texts, has_longer_texts

ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
# Name in config.json -> name in ModelConfig.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# Fields that a config must give, in a key of its own or by a rule.
REQUIRED = ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "norm_eps", "tie_embeddings", "max_position")
WINDOW_TWIN = "sliding_window_size"  # in the first configs of Gemma 2, next to the `sliding_window` that transformers reads
SLIDING_KEYS = ("sliding_window", WINDOW_TWIN, "use_sliding_window", "max_window_layers", "layer_types", *PATTERN_KEYS)
DTYPE_KEYS = ("dtype", "torch_dtype")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # `read_quantization` reads them


def read_fields(hf_config: HfConfig, family: Family, problems: list[str]) -> Fields:
    """The fields of `dense_config` that the config gives; what is wrong with it is appended to `problems`."""
    hf_config = with_own_names(hf_config, family, problems)
    ruled = {key for rule in family.rules for key in rule.keys}
    read = {*family.fields, *family.fixed, *ruled, *rope_keys(family.rope), *DTYPE_KEYS, *SLIDING_KEYS, *QUANTIZATION_KEYS}
    known = {*read, *family.inert, *INERT_KEYS}
    if unknown := {key: value for key, value in hf_config.items() if key not in known and value is not None}:
        problems.append(f"config.json: unknown keys {json.dumps(unknown)}; they may change the computation")
    hf_config = {**family.defaults, **{k: v for k, v in hf_config.items() if v is not None or k in NULLABLE}}
    for key, allowed in family.fixed.items():
        value = hf_config.get(key, allowed)
        if value != allowed and not (value == [] and allowed == {}):  # other programs write an empty object as a list
            problems.append(f"config.json: {key} = {json.dumps(value)} is not supported, only {json.dumps(allowed)}")

    values = {key: hf_config[key] for key in family.fields if key in hf_config}
    fields = {field: value for key, value in values.items() for field in family.fields[key]}
    for key in (key for key in ACTIVATION_KEYS if key in values):
        fields["activation"] = ACTIVATIONS.get(str(values[key]))
        if fields["activation"] is None:
            accepted = ", ".join(ACTIVATIONS)
            problems.append(f"config.json: {key} = {json.dumps(values[key])} is not supported, only {accepted}")
    fields = {**family.traits, **fields}
    if fields.get("num_kv_heads") is None and "num_heads" in fields:
        fields["num_kv_heads"] = fields["num_heads"]
    if fields.get("head_dim") is None and isinstance(fields.get("d_model"), int) and isinstance(fields.get("num_heads"), int):
        fields["head_dim"] = fields["d_model"] // max(1, fields["num_heads"])
    fields |= read_sliding(hf_config, family, fields.get("num_layers"), problems)
    if family.rope is not None:
        fields |= read_rope(hf_config, family.rope, fields.get("head_dim"), problems)
    fields |= read_rules(hf_config, family, fields, problems)
    keys = {field: key for key, names in family.fields.items() for field in names}
    problems += [f"config.json: {keys.get(field, field)} is missing" for field in REQUIRED if field not in fields]
    return {**fields, "dtype": read_dtype(hf_config, problems)}


def with_own_names(hf_config: HfConfig, family: Family, problems: list[str]) -> HfConfig:
    """The config with the names that `family` uses, where a key goes by several."""
    named: HfConfig = {}
    for key, value in hf_config.items():
        name = family.aliases.get(key, key)
        if value is not None and named.get(name) is not None and named[name] != value:
            problems.append(f"config.json: {name} and {key} contradict each other: {json.dumps([named[name], value])}")
        named[name] = value if value is not None else named.get(name)
    return named


def read_rules(hf_config: HfConfig, family: Family, fields: Fields, problems: list[str]) -> Fields:
    """The fields that `family.rules` add, each to those before it; keys that make no sense are a problem."""
    added: Fields = {}
    num_layers: Any = fields.get("num_layers")
    if family.rules and (not is_count(num_layers) or num_layers > MAX_LAYERS):
        problems.append(
            f"config.json: num_layers must be a positive integer, at most {MAX_LAYERS}, got {json.dumps(num_layers)}"
        )
        return added
    for rule in family.rules:
        try:
            added |= rule.read(hf_config, {**fields, **added})
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            given = {key: hf_config.get(key) for key in sorted(rule.keys)}
            said = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            problems.append(f"config.json: {json.dumps(given)}: {said}")
    return added


def read_sliding(hf_config: HfConfig, family: Family, num_layers: Any, problems: list[str]) -> dict[str, Any]:
    """Which layers slide, and their window: from `layer_types`, or by the rule of the family."""
    if not is_count(num_layers) or num_layers > MAX_LAYERS or "sliding_window" in family.fixed:
        return {}  # `ModelConfig` rejects such a number
    if hf_config.get(WINDOW_TWIN, hf_config.get("sliding_window")) != hf_config.get("sliding_window"):
        twins = {key: hf_config.get(key) for key in ("sliding_window", WINDOW_TWIN)}
        problems.append(f"config.json: {json.dumps(twins)} contradict each other")
    types = hf_config.get("layer_types")
    for key in (*PATTERN_KEYS, "max_window_layers") if types is None else ():
        if key in hf_config and not (is_count(hf_config[key]) or hf_config[key] == 0):
            problems.append(f"config.json: {key} must be a whole number of at least 0, got {json.dumps(hf_config[key])}")
            return {}
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
    switched_off = SWITCH.keys() <= family.defaults.keys() and not hf_config.get("use_sliding_window")
    return {"sliding_layers": layers, "sliding_window": None if switched_off else hf_config.get("sliding_window")}


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
    if "alibi" in {getattr(mixer, "positions", "rope") for mixer in mixers}:
        raise InputError(
            f"no family of Hugging Face ({accepted}) encodes positions by linear biases, got Attention.positions 'alibi': "
            "convert to our own folders, which keep them (detspec convert --to orbax)"
        )
    if flat_fields(cfg) is not None and (family := next((each for each in FAMILIES if says_all(each, cfg)), None)) is not None:
        return family
    raise InputError(f"no family of Hugging Face ({accepted}) has a model like {cfg}: our own folders keep it (save_orbax)")


def says_all(family: Family, cfg: ModelConfig) -> bool:
    """Whether a `config.json` of the family describes `cfg`. It need not say `long_texts`: that is an option of `load`."""
    problems: list[str] = []
    fields = read_fields(describe(family, cfg), family, problems)
    if problems:
        return False
    try:
        found = dense_config(**fields)
        return cfg == found or (has_longer_texts(found) and cfg == for_long_texts(found))
    except InputError:  # such as heads of another size, of which a part is rotated
        return False


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
    described = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **fields,
        **(describe_rope(family.rope, flat) if family.rope is not None else {}),
        "dtype": cfg.dtype,
        **(describe_old_rope(family.rope, flat) if family.rope is not None else {}),
    }
    if "sliding_window" not in family.fixed:
        described |= describe_sliding(family, flat)
    for rule in family.rules:
        described |= rule.write(flat)
    return described


def describe_sliding(family: Family, flat: dict[str, Any]) -> HfConfig:
    """The config keys that say which layers slide."""
    described: HfConfig = {"sliding_window": flat["sliding_window"]}
    if "layer_types" not in family.fixed:
        kinds = {slides: kind for kind, slides in LAYER_TYPES.items()}
        described["layer_types"] = [kinds[slides] for slides in flat["sliding_layers"] or (False,) * flat["num_layers"]]
    if SWITCH.keys() <= family.defaults.keys():
        described["use_sliding_window"] = any(flat["sliding_layers"])
    return described
