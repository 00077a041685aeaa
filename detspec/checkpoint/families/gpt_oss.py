"""gpt-oss: attention sinks, biases everywhere, and experts whose gate and up alternate in one transposed tensor."""

import dataclasses

from detspec.checkpoint.families.dense import LLAMA
from detspec.checkpoint.families.expert_keys import ROUTER_TRAINING, experts_rule
from detspec.checkpoint.families.family import FIXED, LLAMA_NAMES, MLP_NAMES, RopeKeys, inert, without
from detspec.checkpoint.layout import in_layer

# What transformers takes where the config says nothing of rotary scaling.
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = dataclasses.replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss 20B and 120B",
    needs="experts with biases and clamped gates, attention sinks, sliding layers, mxfp4",
    defaults={
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 201088,
        "hidden_act": "silu",
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    fixed={**FIXED, "swiglu_alpha": 1.702, "hidden_act": "silu"},
    traits={"sinks": True},
    slides=lambda index, hf_config: index % 2 == 0,
    rules=(
        experts_rule(
            {"num_local_experts": "num", "num_experts_per_tok": "active", "intermediate_size": "d_ff", "swiglu_limit": "clamp"},
            score="chosen",
            bias=True,
        ),
    ),
    aliases={"num_experts": "num_local_experts"},
    inert={
        **ROUTER_TRAINING,
        **inert("transformers reads num_experts_per_tok and the rotary settings", "experts_per_token initial_context_length"),
    },
    names={
        **without(LLAMA_NAMES, *MLP_NAMES),
        "model.layers.{}.self_attn.sinks": ("layers", "{}", "sinks"),
        "model.layers.{}.mlp.router.weight": ("layers", "{}", "router"),
        "model.layers.{}.mlp.router.bias": ("layers", "{}", "router_logit_bias"),
        "model.layers.{}.mlp.experts.gate_up_proj": in_layer("experts_gate", "experts_up", axis=1, turn=1, turned=True),
        "model.layers.{}.mlp.experts.gate_up_proj_bias": in_layer("experts_gate_bias", "experts_up_bias", axis=1, turn=1),
        "model.layers.{}.mlp.experts.down_proj": in_layer("experts_down", axis=1, turned=True),
        "model.layers.{}.mlp.experts.down_proj_bias": ("layers", "{}", "experts_down_bias"),
    },
    rope=RopeKeys(theta=150000.0, default=ROPE),
)
