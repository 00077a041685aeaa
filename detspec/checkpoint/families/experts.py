"""Decoders with experts in place of the MLP: Qwen, Mixtral, OLMoE, Granite, GLM, MiniMax, ERNIE, Hunyuan."""

import dataclasses
from collections.abc import Callable
from typing import Any

from detspec.checkpoint.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from detspec.checkpoint.families.family import (
    FIXED,
    LLAMA_NAMES,
    MLP_NAMES,
    NO_SLIDING,
    SIZE_FIELDS,
    Fields,
    HfConfig,
    RopeKeys,
    Rule,
    TensorNames,
    inert,
    without,
)
from detspec.checkpoint.families.llama_like import ERNIE, GRANITE, HUNYUAN
from detspec.checkpoint.layout import in_layer
from detspec.model.experts import MixtureOfExperts

# Names of three tensors of an expert, or of the shared MLP, in the order of ours.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W_NAMES = ("w1", "w3", "w2")
ROUTER_TRAINING = inert("losses and noise of training alone", "output_router_logits router_aux_loss_coef router_jitter_noise")
PREDICTION = inert(
    "layers that predict further tokens; their tensors are passed over", "num_nextn_predict_layers num_mtp_layers"
)


def expert_names(block: str, projections: tuple[str, ...] = PROJECTIONS, router: str = "gate") -> TensorNames:
    """Tensors of the router and of each expert of a block such as "mlp"."""
    prefix = f"model.layers.{{}}.{block}"
    leaves = zip(projections, ("gate", "up", "down"), strict=True)
    return {
        f"{prefix}.{router}.weight": ("layers", "{}", "router"),
        **{f"{prefix}.experts.{{}}.{theirs}.weight": ("layers", "{}", f"experts_{ours}") for theirs, ours in leaves},
    }


# Parts of names in tables, and those that transformers 5 has in memory, and in files where it is told to.
IN_MEMORY = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
    ".block_sparse_moe.gate.": ".mlp.gate.",
    ".block_sparse_moe.e_score": ".mlp.e_score",
    ".mlp.moe_statics.": ".mlp.gate.moe_statics.",
}


def named_as_in_memory(names: TensorNames) -> TensorNames:
    """The table with the names that transformers 5 has in memory: one tensor for matrices of all experts of a layer."""

    def renamed(name: str) -> str:
        old = next((part for part in IN_MEMORY if part in name), "")
        return name.replace(old, IN_MEMORY[old]) if old else name

    others = {renamed(name): held for name, held in names.items() if ".experts.{}." not in name}
    if len(others) == len(names):  # they lie together in the table, too
        return others
    prefix = "model.layers.{}.mlp.experts."
    gate_up = in_layer("experts_gate", "experts_up", axis=1)
    return {**others, f"{prefix}gate_up_proj": gate_up, f"{prefix}down_proj": ("layers", "{}", "experts_down")}


def shared_names(block: str) -> TensorNames:
    """Tensors of an MLP that every row takes."""
    leaves = zip(PROJECTIONS, ("gate", "up", "down"), strict=True)
    return {f"model.layers.{{}}.mlp.{block}.{theirs}.weight": ("layers", "{}", f"shared_{ours}") for theirs, ours in leaves}


def experts_rule(keys: dict[str, str], **traits: Any) -> Rule:
    """Reads `MixtureOfExperts` from keys -> its fields; other fields are the `traits` of the family."""

    def read(hf_config: HfConfig, fields: Fields) -> Fields:
        values = {field: hf_config[key] for key, field in keys.items()}
        return {"experts": MixtureOfExperts(**values, activation=fields["activation"], **traits)}

    def write(flat: Fields) -> HfConfig:
        experts = flat["experts"]
        return {} if experts is None else {key: getattr(experts, field) for key, field in keys.items()}

    return Rule(frozenset(keys), read, write)


def shared_rule(key: str, unit: str | None = None) -> Rule:
    """Reads the width of the MLP that every row takes: a key says it, or how often it has the width that `unit` says."""

    def read(hf_config: HfConfig, fields: Fields) -> Fields:
        width = (hf_config[key] or 0) * (1 if unit is None else hf_config[unit])
        return {"experts": dataclasses.replace(fields["experts"], shared_d_ff=width)}

    def write(flat: Fields) -> HfConfig:
        experts = flat["experts"]
        return {} if experts is None else {key: experts.shared_d_ff // (1 if unit is None else experts.d_ff)}

    return Rule(frozenset({key}), read, write)


def dense_rule(keys: set[str], is_dense: Callable[[int, HfConfig], bool], write: Callable[[list[bool]], HfConfig]) -> Rule:
    """Reads which layers keep the MLP; `write` takes a flag of each layer."""

    def read(hf_config: HfConfig, fields: Fields) -> Fields:
        flags = tuple(bool(is_dense(index, hf_config)) for index in range(fields["num_layers"]))
        if all(flags):
            raise ValueError("no layer has experts")
        return {"dense_layers": flags}

    return Rule(frozenset(keys), read, lambda flat: write(list(flat["dense_layers"] or (False,) * flat["num_layers"])))


def numbers_of(flags: list[bool]) -> list[int]:
    """The indices of layers with the flag."""
    return [index for index, flag in enumerate(flags) if flag]


QWEN_DENSE = dense_rule(
    {"decoder_sparse_step", "mlp_only_layers"},
    lambda index, hf_config: index in hf_config["mlp_only_layers"] or (index + 1) % hf_config["decoder_sparse_step"] != 0,
    lambda flags: {"decoder_sparse_step": 1, "mlp_only_layers": numbers_of(flags)},
)
QWEN_EXPERTS = {
    "num_experts": "num",
    "num_experts_per_tok": "active",
    "moe_intermediate_size": "d_ff",
    "norm_topk_prob": "renormalised",
}
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
            {"moe_num_experts": "num", "moe_k": "active", "moe_intermediate_size": "d_ff"}, correction=True, renormalised=True
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
