"""Decoders with experts in place of the MLP, chosen by a softmax: Qwen, Mixtral, OLMoE, Granite, Hunyuan."""

import dataclasses
from typing import Any

from detspec.checkpoint.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from detspec.checkpoint.families.expert_keys import (
    QWEN_EXPERTS,
    ROUTER_TRAINING,
    W_NAMES,
    dense_rule,
    expert_names,
    experts_rule,
    named_as_in_memory,
    numbers_of,
    shared_names,
    shared_rule,
)
from detspec.checkpoint.families.family import (
    FIXED,
    LLAMA_NAMES,
    MLP_NAMES,
    NO_SLIDING,
    Fields,
    HfConfig,
    RopeKeys,
    Rule,
    without,
)
from detspec.checkpoint.families.llama_like import GRANITE, HUNYUAN
from detspec.checkpoint.layout import in_layer
from detspec.model.experts import MixtureOfExperts

QWEN_DENSE = dense_rule(
    {"decoder_sparse_step", "mlp_only_layers"},
    lambda index, hf_config: index in hf_config["mlp_only_layers"] or (index + 1) % hf_config["decoder_sparse_step"] != 0,
    lambda flags: {"decoder_sparse_step": 1, "mlp_only_layers": numbers_of(flags)},
)
QWEN_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}
QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder",
    needs="experts, norms of query and key heads",
    defaults={
        **QWEN3.defaults,
        **QWEN_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    fixed={**FIXED, "layer_types": None, "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    slides=lambda index, hf_config: bool(hf_config.get("use_sliding_window")),
    rules=(experts_rule(QWEN_EXPERTS), QWEN_DENSE),
    aliases={"num_local_experts": "num_experts"},
    inert=ROUTER_TRAINING,
    variants=(named_as_in_memory,),
    names={**LLAMA_NAMES, **expert_names("mlp")},
)
QWEN2_MOE = dataclasses.replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE-A2.7B, Qwen2 57B-A14B",
    needs="experts, a shared one with a gate, biases of queries, keys and values",
    fields={**QWEN2.fields, "qkv_bias": ("qkv_bias",)},
    defaults={
        **QWEN2.defaults,
        **QWEN_DEFAULTS,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    fixed={**FIXED, "use_sliding_window": False},
    traits={},
    slides=lambda index, hf_config: False,
    rules=(experts_rule(QWEN_EXPERTS, shared_gate=True), shared_rule("shared_expert_intermediate_size"), QWEN_DENSE),
    inert=ROUTER_TRAINING,
    variants=(named_as_in_memory,),
    names={
        **LLAMA_NAMES,
        **expert_names("mlp"),
        **shared_names("shared_expert"),
        "model.layers.{}.mlp.shared_expert_gate.weight": ("layers", "{}", "shared_weight"),
    },
)
MIXTRAL = dataclasses.replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral 8x7B and 8x22B",
    needs="experts",
    defaults={
        **MISTRAL.defaults,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    rules=(
        experts_rule(
            {"num_local_experts": "num", "num_experts_per_tok": "active", "intermediate_size": "d_ff"}, renormalised=True
        ),
    ),
    aliases={"num_experts": "num_local_experts"},
    inert=ROUTER_TRAINING,
    variants=(named_as_in_memory,),
    names={**without(LLAMA_NAMES, *MLP_NAMES), **expert_names("block_sparse_moe", W_NAMES)},
    rope=RopeKeys(theta=1e6),
)
OLMOE = dataclasses.replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    models="OLMoE 1B-7B",
    needs="experts, norms over all heads of queries and of keys",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={**FIXED, **NO_SLIDING, "clip_qkv": None},
    traits={"qk_norm": True, "qk_norm_of": "width"},
    rules=(experts_rule({**without(QWEN_EXPERTS, "moe_intermediate_size"), "intermediate_size": "d_ff"}),),
    aliases={"num_local_experts": "num_experts"},
    inert=ROUTER_TRAINING,
    variants=(named_as_in_memory,),
    names={**without(LLAMA_NAMES, *MLP_NAMES), **expert_names("mlp")},
)
GRANITE_MOE = dataclasses.replace(
    GRANITE,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    models="Granite 3.0 and 3.1 1B-A400M, 3B-A800M",
    needs="experts in fused tensors, weighed by a softmax over the chosen ones, scales as Granite 3",
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    rules=(
        experts_rule(
            {"num_local_experts": "num", "num_experts_per_tok": "active", "intermediate_size": "d_ff"}, score="chosen"
        ),
    ),
    inert=ROUTER_TRAINING,
    variants=(named_as_in_memory,),
    names={
        **without(LLAMA_NAMES, *MLP_NAMES),
        "model.layers.{}.block_sparse_moe.router.layer.weight": ("layers", "{}", "router"),
        "model.layers.{}.block_sparse_moe.input_linear.weight": in_layer("experts_gate", "experts_up", axis=1),
        "model.layers.{}.block_sparse_moe.output_linear.weight": ("layers", "{}", "experts_down"),
    },
)


def one_of(value: Any) -> Any:
    """Hunyuan: a number, or a list that says the same number of each layer."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def read_hunyuan(hf_config: HfConfig, fields: Fields) -> Fields:
    """Hunyuan: every layer has experts, and an MLP of the same width that each row takes."""
    return {
        "experts": MixtureOfExperts(
            one_of(hf_config["num_experts"]),
            one_of(hf_config["moe_topk"]),
            fields["d_ff"],
            fields["activation"],
            renormalised=True,
            shared_d_ff=fields["d_ff"],
        )
    }


def write_hunyuan(flat: Fields) -> HfConfig:
    """The way back of `read_hunyuan`."""
    experts = flat["experts"]
    return {} if experts is None else {"num_experts": experts.num, "moe_topk": experts.active}


HUNYUAN_MOE = dataclasses.replace(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    models="Hunyuan A13B",
    needs="as Hunyuan, experts, a shared one",
    rules=(Rule(frozenset({"num_experts", "moe_topk"}), read_hunyuan, write_hunyuan),),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    inert={**HUNYUAN.inert, **ROUTER_TRAINING},
    variants=(named_as_in_memory,),
    names={
        **without(HUNYUAN.names, *MLP_NAMES),  # type: ignore[arg-type]
        **expert_names("mlp", router="gate.wg"),
        **shared_names("shared_mlp"),
    },
)
