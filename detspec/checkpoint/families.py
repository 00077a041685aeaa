"""Model families of Hugging Face: what the keys of `config.json` and the names of tensors mean to us.

A new family is one more `Family`: our matrices are `[out, in]` like those of every checkpoint, so a name table is all the
conversion there is.
"""

import dataclasses
import itertools
import json
from typing import Any

from detspec.config import DTYPES, ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` of Hugging Face maps to a `ModelConfig` and its parameters.

    Attributes:
        model_type: value of the config key of that name.
        architecture: the class whose checkpoints these are.
        fields: config key -> field of `ModelConfig`.
        defaults: values of config keys that may be left out or null.
        fixed: config keys that would change the computation, and the values that leave it as it is; missing means the first.
        names: tensor name -> path in the pytree; `{}` stands for the layer's index.
        skipped_suffixes: tensors that hold nothing but constants.
    """

    model_type: str
    architecture: str
    fields: dict[str, str]
    defaults: dict[str, Any]
    fixed: dict[str, tuple[Any, ...]]
    names: dict[str, tuple[str, ...]]
    skipped_suffixes: tuple[str, ...]


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "d_ff",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "max_position_embeddings": "max_position",
    },
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048},
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1, None),
        "sliding_window": (None,),
        "use_sliding_window": (False, None),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
        "logit_scale": (1.0, None),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
    },
    names={
        "model.embed_tokens.weight": ("embed",),
        "model.layers.{}.input_layernorm.weight": ("layers", "{}", "attn_norm"),
        "model.layers.{}.self_attn.q_proj.weight": ("layers", "{}", "q"),
        "model.layers.{}.self_attn.k_proj.weight": ("layers", "{}", "k"),
        "model.layers.{}.self_attn.v_proj.weight": ("layers", "{}", "v"),
        "model.layers.{}.self_attn.o_proj.weight": ("layers", "{}", "o"),
        "model.layers.{}.post_attention_layernorm.weight": ("layers", "{}", "mlp_norm"),
        "model.layers.{}.mlp.gate_proj.weight": ("layers", "{}", "gate"),
        "model.layers.{}.mlp.up_proj.weight": ("layers", "{}", "up"),
        "model.layers.{}.mlp.down_proj.weight": ("layers", "{}", "down"),
        "model.norm.weight": ("final_norm",),
        "lm_head.weight": ("head",),
    },
    skipped_suffixes=(".self_attn.rotary_emb.inv_freq",),
)

FAMILIES = (LLAMA,)

# Keys that say nothing about the computation of logits at inference, in any family.
HARMLESS_KEYS = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})


def find_family(hf_config: dict[str, Any], problems: list[str]) -> Family | None:
    """The family that `model_type` and `architectures` name."""
    model_type = hf_config.get("model_type")
    architectures = hf_config.get("architectures")
    for family in FAMILIES:
        if model_type == family.model_type and architectures in (None, [family.architecture]):
            return family
    accepted = ", ".join(f"model_type {family.model_type!r} ({family.architecture})" for family in FAMILIES)
    problems.append(
        f"config.json: unsupported model_type {model_type!r} with architectures {architectures!r}; accepted: {accepted}"
    )
    return None


def read_fields(hf_config: dict[str, Any], family: Family, problems: list[str]) -> dict[str, Any] | None:
    """Fields of `ModelConfig`, as far as the config gives them; None when one of them is missing."""
    known = {*family.fields, *family.fixed, *HARMLESS_KEYS, *ROPE_KEYS, *DTYPE_KEYS}
    unknown = {key: value for key, value in hf_config.items() if key not in known}
    if unknown:
        problems.append(f"config.json: unknown keys {json.dumps(unknown)}; they may change the computation")
    for key, allowed in family.fixed.items():
        value = hf_config.get(key, allowed[0])
        if value not in allowed:
            problems.append(f"config.json: {key} = {json.dumps(value)} is not supported, only {json.dumps(allowed[0])}")

    values = {key: hf_config[key] for key in family.fields if hf_config.get(key) is not None}
    values = {**family.defaults, **values}
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if (
        "head_dim" not in values
        and isinstance(values.get("hidden_size"), int)
        and isinstance(values.get("num_attention_heads"), int)
    ):
        values["head_dim"] = values["hidden_size"] // max(1, values["num_attention_heads"])
    for key in (key for key in family.fields if key not in values):
        problems.append(f"config.json: {key} is missing")
    fields = {family.fields[key]: value for key, value in values.items()}
    fields["rope_theta"] = read_rope_theta(hf_config, problems)
    fields["dtype"] = read_dtype(hf_config, problems)
    for name in ("rope_theta", "norm_eps"):
        if not isinstance(fields[name], int | float) or isinstance(fields[name], bool) or not fields[name] > 0:
            problems.append(f"config.json: {name} must be a positive number, got {json.dumps(fields[name])}")
    if not isinstance(fields["tie_embeddings"], bool):
        problems.append(f"config.json: tie_word_embeddings must be true or false, got {json.dumps(fields['tie_embeddings'])}")
    return fields


def read_rope_theta(hf_config: dict[str, Any], problems: list[str]) -> Any:
    """The rotary base, from `rope_theta` or (transformers 5) from `rope_parameters`; any other rotary setting is a problem."""
    bases = [hf_config["rope_theta"]] if hf_config.get("rope_theta") is not None else []
    for key in ("rope_parameters", "rope_scaling"):
        setting = hf_config.get(key)
        if setting is None:
            continue
        rest = dict(setting) if isinstance(setting, dict) else {"": setting}
        kinds = {rest.pop("rope_type", "default"), rest.pop("type", "default")} if isinstance(setting, dict) else set()
        base = rest.pop("rope_theta", None)
        bases += [base] if base is not None else []
        if kinds != {"default"} or rest:
            problems.append(f"config.json: {key} = {json.dumps(setting)} is not supported, only null or rope_type 'default'")
    if any(base != bases[0] for base in bases):
        problems.append(f"config.json: rope_theta is given as {' and '.join(str(base) for base in bases)}")
    return bases[0] if bases else 10000.0


def read_dtype(hf_config: dict[str, Any], problems: list[str]) -> str | None:
    """The dtype the config asks for, or None."""
    for key in ("dtype", "torch_dtype"):
        value = hf_config.get(key)
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in DTYPES:
                problems.append(f"config.json: {key} = {json.dumps(value)} is not supported, only {', '.join(DTYPES)}")
            return name
    return None


def describe(family: Family, cfg: ModelConfig) -> dict[str, Any]:
    """The `config.json` of `cfg`, with the rotary base in the words of transformers 4 and of 5."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(cfg, field) for key, field in family.fields.items()},
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_theta": cfg.rope_theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": cfg.dtype,
    }


def tensor_paths(family: Family, cfg: ModelConfig) -> dict[str, tuple[str | int, ...]]:
    """Tensor name -> path in the pytree, layers in ascending order, for all the tensors `cfg` asks for."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for layered, templates in itertools.groupby(family.names.items(), key=lambda item: "{}" in item[0]):
        templates_here = list(templates)
        for index in range(cfg.num_layers) if layered else (0,):
            for name, path in templates_here:
                if path != ("head",) or not cfg.tie_embeddings:
                    paths[name.format(index)] = tuple(index if part == "{}" else part for part in path)
    return paths
