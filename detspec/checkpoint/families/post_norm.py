"""Decoders whose norms stand elsewhere: after attention and MLP, or before and after under names of their own."""

import dataclasses

from detspec.checkpoint.families.dense import LLAMA
from detspec.checkpoint.families.family import (
    FIXED,
    FUSED_GATE_NAMES,
    GEMMA_NAMES,
    NO_PADDING,
    NO_SLIDING,
    Fields,
    HfConfig,
    RopeKeys,
    Rule,
    sliding_pattern,
    without,
)

OLMO2 = dataclasses.replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2 1B to 32B",
    needs="norms after alone, norms over all heads of queries and of keys",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    traits={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_of": "width"},
    names=GEMMA_NAMES,
)
OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3 7B and 32B",
    needs="as OLMo 2, sliding layers whose rotations are not scaled",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    fixed=FIXED,
    slides=lambda index, hf_config: (index + 1) % 4 != 0,
    rope=RopeKeys(theta=5e5, sliding_theta=5e5),
)


def read_unrotated_full(hf_config: HfConfig, fields: Fields) -> Fields:
    """EXAONE 4: where some layers slide, the others rotate nothing."""
    if hf_config["sliding_window"] is None:
        if hf_config.get("layer_types") is None:
            raise ValueError("a model without a sliding_window must have layer_types")
        return {}
    slides = fields.get("sliding_layers") or (False,) * fields["num_layers"]
    return {"unrotated_layers": tuple(not flag for flag in slides)}


def slides_by_pattern(index: int, hf_config: HfConfig) -> bool:
    """EXAONE 4: all layers slide but for one in so many; none does without a window."""
    return hf_config["sliding_window"] is not None and (index + 1) % (sliding_pattern(hf_config) or 4) != 0


EXAONE4 = dataclasses.replace(
    LLAMA,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4.0 1.2B and 32B",
    needs="norms after alone, norms of query and key heads, sliding layers, full layers that rotate nothing",
    fields={key: field for key, field in LLAMA.fields.items() if key != "attention_bias"},
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    fixed={**FIXED, "attention_bias": False},
    slides=slides_by_pattern,
    traits={"pre_norms": False, "post_norms": True, "qk_norm": True},
    rules=(Rule(frozenset({"sliding_window", "layer_types"}), read_unrotated_full, lambda flat: {}),),
    names=GEMMA_NAMES,
)
GLM4 = dataclasses.replace(
    LLAMA,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4 9B and 32B 0414",
    needs="norms before and after, half of a head rotated, neighbours, biases of queries, keys and values, fused gates",
    fields={**LLAMA.fields, "attention_bias": ("qkv_bias",)},
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "attention_bias": True,
    },
    fixed=without({**FIXED, **NO_SLIDING}, "partial_rotary_factor"),
    traits={"post_norms": True, "rope_interleaved": True},
    rules=(NO_PADDING,),
    rope=RopeKeys(share=0.5),
    names={
        **FUSED_GATE_NAMES,
        "model.layers.{}.post_self_attn_layernorm.weight": ("layers", "{}", "attn_post_norm"),
        "model.layers.{}.post_mlp_layernorm.weight": ("layers", "{}", "mlp_post_norm"),
    },
)
