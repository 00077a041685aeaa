"""Keys and names of tensors that families with experts share: what they are put together from."""

import dataclasses
from collections.abc import Callable
from typing import Any

from detspec.checkpoint.families.family import Fields, HfConfig, Rule, TensorNames, inert
from detspec.checkpoint.layout import in_layer
from detspec.model.experts import MixtureOfExperts

# Names of three tensors of an expert, or of the shared MLP, in the order of ours.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W_NAMES = ("w1", "w3", "w2")
ROUTER_TRAINING = inert("losses and noise of training alone", "output_router_logits router_aux_loss_coef router_jitter_noise")
PREDICTION = inert(
    "layers that predict further tokens; their tensors are passed over", "num_nextn_predict_layers num_mtp_layers"
)
# Keys of a config -> fields of `MixtureOfExperts`, by the names of Qwen.
QWEN_EXPERTS = {
    "num_experts": "num",
    "num_experts_per_tok": "active",
    "moe_intermediate_size": "d_ff",
    "norm_topk_prob": "renormalised",
}


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
