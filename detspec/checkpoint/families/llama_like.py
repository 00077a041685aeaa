"""Decoders that differ from Llama by values alone: scales, biases, rotations, a window, the activation."""

import dataclasses

from detspec.checkpoint.families.dense import LLAMA, MISTRAL
from detspec.checkpoint.families.family import (
    FIXED,
    FUSED_GATE_NAMES,
    LLAMA_NAMES,
    MLP_NAMES,
    NO_PADDING,
    NO_SLIDING,
    SIZE_FIELDS,
    SWITCH,
    Fields,
    HfConfig,
    RopeKeys,
    Rule,
    inert,
    without,
)
from detspec.checkpoint.layout import in_layer

# Ids of tokens, and a number of them, that Tencent's configs carry.
TENCENT_IDS = "eod_token_id pad_id im_start_id im_end_id im_newline_id text_start_id text_end_id mask_init_id org_vocab_size"


def read_gemma_activation(hf_config: HfConfig, fields: Fields) -> Fields:
    """Gemma 1: transformers takes "gelu" for the approximation, which the models were made with."""
    if (name := hf_config.get("hidden_act")) not in (None, "gelu", "gelu_pytorch_tanh"):
        raise ValueError(f"hidden_act {name!r} is not supported, only gelu_pytorch_tanh")
    return {"activation": "gelu_tanh"}


GEMMA = dataclasses.replace(
    LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    models="Gemma 1, CodeGemma",
    needs="1 + w norms, scaled embeddings",
    fields={**SIZE_FIELDS, "attention_bias": ("qkv_bias", "o_bias")},
    defaults={
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "head_dim": 256,
    },
    fixed={**FIXED, **NO_SLIDING, "hidden_activation": "gelu_pytorch_tanh"},
    traits={"norm_plus_one": True, "scale_embeddings": True},
    rules=(Rule(frozenset({"hidden_act"}), read_gemma_activation, lambda flat: {"hidden_act": "gelu_pytorch_tanh"}),),
)


def rotates(index: int, hf_config: HfConfig) -> bool:
    """SmolLM3: whether layer `index` rotates its queries and keys."""
    layers = hf_config.get("no_rope_layers")
    return bool((index + 1) % hf_config.get("no_rope_layer_interval", 4) if layers is None else layers[index])


def read_unrotated(hf_config: HfConfig, fields: Fields) -> Fields:
    """SmolLM3: layers with a 0 in `no_rope_layers`, or every fourth, rotate nothing."""
    layers = hf_config.get("no_rope_layers")
    if layers is not None and len(layers) != fields["num_layers"]:
        raise ValueError(f"no_rope_layers must say 0 or 1 of each of the {fields['num_layers']} layers")
    return {"unrotated_layers": tuple(not rotates(index, hf_config) for index in range(fields["num_layers"]))}


def write_unrotated(flat: Fields) -> HfConfig:
    """The way back of `read_unrotated`."""
    return {"no_rope_layers": [int(not flag) for flag in flat["unrotated_layers"] or (False,) * flat["num_layers"]]}


def slides_unrotated(index: int, hf_config: HfConfig) -> bool:
    """SmolLM3: layers that rotate nothing slide, if any do."""
    return (
        bool(hf_config.get("use_sliding_window"))
        and hf_config.get("sliding_window") is not None
        and not rotates(index, hf_config)
    )


SMOLLM3 = dataclasses.replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3 3B",
    needs="layers that rotate nothing",
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        **SWITCH,
    },
    fixed=FIXED,
    slides=slides_unrotated,
    rules=(Rule(frozenset({"no_rope_layers", "no_rope_layer_interval"}), read_unrotated, write_unrotated), NO_PADDING),
    rope=RopeKeys(theta=2e6),
)
GRANITE_FIELDS = {
    **LLAMA.fields,
    "embedding_multiplier": ("embed_scale",),
    "residual_multiplier": ("residual_scale",),
    "attention_multiplier": ("score_scale",),
    "logits_scaling": ("logit_divisor",),
}
GRANITE_DEFAULTS = {
    **LLAMA.defaults,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE = dataclasses.replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3.0 to 3.3",
    needs="scales of embeddings, residuals, scores and logits",
    fields=GRANITE_FIELDS,
    defaults=GRANITE_DEFAULTS,
)
SEED_OSS = dataclasses.replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS 36B",
    needs="biases of queries, keys and values",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",), "attention_bias": ("qkv_bias",), "attention_out_bias": ("o_bias",)},
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    inert=inert("training alone", "residual_dropout"),
)
HUNYUAN = dataclasses.replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    models="Hunyuan 0.5B to 7B",
    needs="norms of query and key heads after the rotation, a base that is raised by `alpha`",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    fixed={**FIXED, **NO_SLIDING, "use_cla": False, "use_qk_norm": True, "norm_type": "rms"},
    traits={"qk_norm": True, "qk_norm_of": "rotated"},
    inert={
        **inert("ids of tokens", TENCENT_IDS),
        **inert("says nothing without use_cla", "cla_share_factor"),
        **inert("head_dim says it", "attention_head_dim"),
    },
    rope=RopeKeys(alpha=True),
    names={
        name.replace("q_norm", "query_layernorm").replace("k_norm", "key_layernorm"): path for name, path in LLAMA_NAMES.items()
    },
)
ERNIE = dataclasses.replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    models="ERNIE 4.5 0.3B",
    needs="rotations of neighbours",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",)},
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    fixed={**FIXED, **NO_SLIDING, "use_bias": False},
    traits={"rope_interleaved": True},
    rope=RopeKeys(theta=5e5),
)
HELIUM = dataclasses.replace(
    LLAMA,
    model_type="helium",
    architecture="HeliumForCausalLM",
    models="Helium 1 2B",
    needs="rotations of neighbours",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",), "attention_bias": ("qkv_bias",)},
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
    traits={"rope_interleaved": True},
    rope=RopeKeys(theta=1e5),
)
ARCEE = dataclasses.replace(
    LLAMA,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    models="AFM 4.5B",
    needs="an MLP without a gate, relu squared",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "relu2"},
    traits={"gated": False},
)
MINISTRAL = dataclasses.replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    models="Ministral 8B",
    needs="sliding layers",
    defaults={**MISTRAL.defaults, "num_key_value_heads": 8},
    fixed=without(MISTRAL.fixed, "layer_types"),
)


def read_long(hf_config: HfConfig, fields: Fields) -> Fields:
    """Phi-3: with "longrope", texts up to the original length have factors of their own; see `for_long_texts`."""
    scaling = fields.get("rope_scaling")
    return {} if scaling is None else {"max_position": min(fields["max_position"], scaling.original_max_position)}


def write_long(flat: Fields) -> HfConfig:
    """The way back of `read_long`."""
    scaling = flat["rope_scaling"]
    if scaling is None:
        return {"original_max_position_embeddings": flat["max_position"]}
    longest = max(flat["max_position"], round(scaling.original_max_position * scaling.factor))
    return {"original_max_position_embeddings": scaling.original_max_position, "max_position_embeddings": longest}


PHI3 = dataclasses.replace(
    MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4 mini",
    needs="fused matrices, rotations with factors for short or for long texts, heads rotated in part, sliding window",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    fixed={**without(FIXED, "partial_rotary_factor"), "layer_types": None, "attention_bias": False, "lm_head_bias": False},
    rules=(Rule(frozenset({"original_max_position_embeddings"}), read_long, write_long), NO_PADDING),
    inert=inert("settings of Phi-4 mini that its code does not read", "full_attn_mod interpolate_factor"),
    rope=RopeKeys(share=1.0, kinds=("longrope",)),
    names={
        **without(FUSED_GATE_NAMES, *(f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkv")),
        "model.layers.{}.self_attn.qkv_proj.weight": in_layer("q", "k", "v"),
    },
)


def read_attention_alone(hf_config: HfConfig, fields: Fields) -> Fields:
    """Granite 4: layers of Mamba are not supported; `position_embedding_type` says whether the others rotate."""
    types = hf_config.get("layer_types")
    if not isinstance(types, list) or len(types) != fields["num_layers"] or not set(types) <= {"attention", "full_attention"}:
        raise ValueError("layers of Mamba are not supported, only layer_types of attention")
    kind = hf_config.get("position_embedding_type")
    return {"position_encoding": "rope" if kind == "rope" else "none"}


def write_attention_alone(flat: Fields) -> HfConfig:
    """The way back of `read_attention_alone`; transformers checks sizes of Mamba, of which there is none."""
    return {
        "layer_types": ["full_attention"] * flat["num_layers"],
        "position_embedding_type": "rope" if flat["position_encoding"] == "rope" else None,
        "num_local_experts": 0,
        "mamba_n_heads": 1,
    }


GRANITE4 = dataclasses.replace(
    GRANITE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4.0 without Mamba: 350M, 1B, Micro",
    needs="as Granite 3, fused gates",
    fields={**without(GRANITE_FIELDS, "intermediate_size"), "shared_intermediate_size": ("d_ff",)},
    defaults={**GRANITE_DEFAULTS, "shared_intermediate_size": 1024, "num_local_experts": 8},
    fixed={**FIXED, **without(NO_SLIDING, "layer_types"), "num_local_experts": 0, "normalization_function": "rmsnorm"},
    rules=(Rule(frozenset({"layer_types", "position_embedding_type"}), read_attention_alone, write_attention_alone),),
    aliases={"layers_block_type": "layer_types"},
    inert={
        **inert(
            "layers of Mamba, of which there is none",
            "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size "
            "mamba_conv_bias mamba_proj_bias time_step_limit time_step_min time_step_max",
        ),
        **inert(
            "experts, of which there is none", "num_experts_per_tok intermediate_size output_router_logits router_aux_loss_coef"
        ),
        **inert("training alone", "init_method"),
    },
    names={
        **without(LLAMA_NAMES, *MLP_NAMES),
        "model.layers.{}.shared_mlp.input_linear.weight": in_layer("gate", "up"),
        "model.layers.{}.shared_mlp.output_linear.weight": ("layers", "{}", "down"),
    },
)
