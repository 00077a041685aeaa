"""Decoders with experts that a bias helps to choose, some of them shared by all rows: GLM-4.5, MiniMax-M2, ERNIE."""

import dataclasses

from detspec.checkpoint.families.dense import LLAMA
from detspec.checkpoint.families.expert_keys import (
    PREDICTION,
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
    SIZE_FIELDS,
    HfConfig,
    RopeKeys,
    inert,
    without,
)
from detspec.checkpoint.families.llama_like import ERNIE
from detspec.checkpoint.layout import in_layer

GLM4_MOE = dataclasses.replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, 4.6 and 4.7, GLM-4.5-Air",
    needs="experts with a correction bias, shared ones, half of a head rotated",
    fields={**LLAMA.fields, "attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_norm",)},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    fixed=without({**FIXED, **NO_SLIDING}, "partial_rotary_factor"),
    rules=(
        experts_rule(
            {
                **without(QWEN_EXPERTS, "num_experts"),
                "n_routed_experts": "num",
                "routed_scaling_factor": "scale",
                "n_group": "groups",
                "topk_group": "active_groups",
            },
            score="sigmoid",
            correction=True,
            float32_router=True,
        ),
        shared_rule("n_shared_experts", "moe_intermediate_size"),
        dense_rule(
            {"first_k_dense_replace"},
            lambda index, hf_config: index < hf_config["first_k_dense_replace"],
            lambda flags: {"first_k_dense_replace": sum(flags)},
        ),
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    inert={**ROUTER_TRAINING, **PREDICTION},
    predicted="num_nextn_predict_layers",
    rope=RopeKeys(share=0.5),
    variants=(named_as_in_memory,),
    names={
        **LLAMA_NAMES,
        **expert_names("mlp"),
        "model.layers.{}.mlp.gate.e_score_correction_bias": ("layers", "{}", "router_bias"),
        **shared_names("shared_experts"),
    },
)
MINIMAX_M2 = dataclasses.replace(
    LLAMA,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    models="MiniMax-M2",
    needs="experts with a correction bias, norms over all heads of queries and of keys, heads rotated in part",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",)},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    fixed={
        **without({**FIXED, **NO_SLIDING}, "partial_rotary_factor"),
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
    traits={"qk_norm": True, "qk_norm_of": "width"},
    rules=(
        experts_rule(
            {"num_local_experts": "num", "num_experts_per_tok": "active", "intermediate_size": "d_ff"},
            score="sigmoid",
            correction=True,
            renormalised=True,
        ),
    ),
    aliases={"num_experts": "num_local_experts"},
    inert={
        **ROUTER_TRAINING,
        **inert(
            "layers that predict further tokens; they are not in the files", "use_mtp num_mtp_modules mtp_transformer_layers"
        ),
        **inert("says nothing without a shared expert", "shared_moe_mode"),
        **inert("all layers attend, and max_position_embeddings is the length", "attn_type_list max_model_len"),
    },
    rope=RopeKeys(theta=5e6, share=1.0, size_key="rotary_dim"),
    variants=(named_as_in_memory,),
    names={
        **without(LLAMA_NAMES, *MLP_NAMES),
        **expert_names("block_sparse_moe", W_NAMES),
        "model.layers.{}.block_sparse_moe.e_score_correction_bias": ("layers", "{}", "router_bias"),
    },
)


def is_dense_ernie(index: int, hf_config: HfConfig) -> bool:
    """ERNIE: layers from the first to the last one have experts, or one in so many of them."""
    last = hf_config["moe_layer_end_index"]
    within = hf_config["moe_layer_start_index"] <= index and (last == -1 or index <= last)
    return not within or (index + 1) % hf_config["moe_layer_interval"] != 0


def write_ernie(flags: list[bool]) -> HfConfig:
    """The way back of `is_dense_ernie`, for layers that have experts without a gap."""
    sparse = numbers_of([not flag for flag in flags])
    return {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1], "moe_layer_interval": 1}


ERNIE_MOE = dataclasses.replace(
    ERNIE,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    models="ERNIE 4.5 21B-A3B and 300B-A47B",
    needs="experts with a correction bias, shared ones, rotations of neighbours",
    defaults={
        **without(ERNIE.defaults, "head_dim"),
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    fixed={**ERNIE.fixed, "moe_norm_min": 1e-12, "moe_gate": "topk", "moe_use_aux_free": True},
    rules=(
        experts_rule(
            {"moe_num_experts": "num", "moe_k": "active", "moe_intermediate_size": "d_ff"},
            correction=True,
            renormalised=True,
            float32_router=True,
        ),
        shared_rule("moe_num_shared_experts", "moe_intermediate_size"),
        dense_rule({"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"}, is_dense_ernie, write_ernie),
    ),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    towers=r"model\.mtp_.+",
    inert={**ROUTER_TRAINING, **PREDICTION, **inert("training alone: how many tokens an expert takes", "moe_capacity")},
    variants=(named_as_in_memory,),
    names={
        **LLAMA_NAMES,
        **expert_names("mlp"),
        "model.layers.{}.mlp.moe_statics.e_score_correction_bias": in_layer("router_bias", ones=1),
        **shared_names("shared_experts"),
    },
)
