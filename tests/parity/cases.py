"""Small models of every family with odd shapes and random weights, made and saved by transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB_SIZE = 101
LENGTH = 120  # longer than every sliding window and original rotary length below
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Query heads, KV heads and head dimension; only the first head dimension is D / N.
GQA_1, GQA_3, GQA_8 = (
    {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    for heads, kv_heads, head_dim in ((6, 6, 8), (6, 2, 12), (8, 1, 10))
)
GQA = {"num_attention_heads": 6, "num_key_value_heads": 2}  # where a head is D / N
ROPE = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GQA_1, "rope_parameters": {**ROPE, "rope_type": "default"}}),
    "llama_bias_tied": ("Llama", {**GQA_3, "attention_bias": True, "tie_word_embeddings": True}),
    "llama_linear": ("Llama", {**GQA_3, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama_llama3": ("Llama", {**GQA_8, "rope_parameters": {"rope_theta": 500.0, **LLAMA3}}),
    "mistral": ("Mistral", {**GQA_8, "sliding_window": 17}),
    "mistral_full": ("Mistral", {**GQA_3, "sliding_window": None}),
    "qwen2": ("Qwen2", {**GQA_3, "tie_word_embeddings": True}),
    "qwen2_sliding": ("Qwen2", {**GQA_1, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", {**GQA_3, "rope_parameters": {**ROPE, **YARN}}),
    "qwen3": ("Qwen3", {**GQA_8, "tie_word_embeddings": True}),
    "qwen3_bias": ("Qwen3", {**GQA_1, "attention_bias": True}),
    "gemma2": ("Gemma2", {**GQA_3, "query_pre_attn_scalar": 20, "sliding_window": 16, "num_hidden_layers": 4}),
    "gemma3": ("Gemma3Text", {**GQA_8, "query_pre_attn_scalar": 20, "sliding_window": 16, "num_hidden_layers": 7}),
    "gemma3_linear": (
        "Gemma3Text",
        {
            **GQA_3,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
    ),
}
MULTIPLIERS = {"embedding_multiplier": 12, "attention_multiplier": 0.09, "residual_multiplier": 0.22, "logits_scaling": 7.0}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", GQA_8),
    "smollm3": ("SmolLM3", {**GQA, "num_hidden_layers": 4}),
    "smollm3_sliding": (
        "SmolLM3",
        {**GQA, "use_sliding_window": True, "sliding_window": 17, "no_rope_layers": [0, 1, 1], "attention_bias": True},
    ),
    "granite": ("Granite", {**GQA, **MULTIPLIERS}),
    "seed_oss": ("SeedOss", GQA_3),
    "seed_oss_out_bias": ("SeedOss", {**GQA_3, "attention_out_bias": True}),
    "hunyuan": ("HunYuanDenseV1", GQA_3),
    "hunyuan_alpha": (
        "HunYuanDenseV1",
        {**GQA_3, "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "ernie": ("Ernie4_5", GQA_3),
    "helium": ("Helium", {**GQA, "head_dim": 8, "attention_bias": True}),
    "arcee": ("Arcee", GQA),
    "ministral": (
        "Ministral",
        {**GQA_8, "sliding_window": 17, "layer_types": [*(["sliding_attention"] * 2), "full_attention"]},
    ),
    "olmo2": ("Olmo2", GQA),
    "olmo3": ("Olmo3", {**GQA, "num_hidden_layers": 4, "sliding_window": 17}),
    "olmo3_yarn": (
        "Olmo3",
        {
            **GQA,
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, **YARN},
                "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
            },
        },
    ),
    "exaone4": ("Exaone4", {**GQA, "num_hidden_layers": 4, "sliding_window": 17, "rope_parameters": {**ROPE, **LLAMA3}}),
    "exaone4_full": ("Exaone4", {**GQA, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}
NO_MAMBA = {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 56, "mamba_n_heads": 12}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {**GQA, "sliding_window": 17}),
    "phi3_longrope": ("Phi3", {**GQA, "original_max_position_embeddings": 128, "rope_parameters": {**ROPE, **LONG}}),
    "phi3_part": ("Phi3", {**GQA, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "glm4": ("Glm4", {**GQA_3, "attention_bias": True}),
    "granite4": ("GraniteMoeHybrid", {**GQA, **MULTIPLIERS, **NO_MAMBA, "position_embedding_type": "rope"}),
    "granite4_nope": ("GraniteMoeHybrid", {**GQA, **NO_MAMBA}),
}
OF_LAYER_NORM: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": ("Nemotron", {**GQA, "attention_bias": True}),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": 17}),
    "starcoder2_unbiased": ("Starcoder2", {**GQA, "use_bias": False, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", {"num_attention_heads": 6}),
    "gpt2_inner": ("GPT2", {"num_attention_heads": 4, "n_inner": 56, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoX", {"num_attention_heads": 3}),
    "gpt_neox_in_turn": (
        "GPTNeoX",
        {"num_attention_heads": 6, "use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "opt": ("OPT", {"num_attention_heads": 6, "ffn_dim": 56}),
    "opt_unbiased": ("OPT", {"num_attention_heads": 6, "ffn_dim": 56, "enable_bias": False, "activation_function": "gelu"}),
}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**GQA_8, **MOE, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        {**GQA_8, **MOE, "num_experts": 8, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 17},
    ),
    "qwen2_moe": ("Qwen2Moe", {**GQA, **MOE, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4, "sliding_window": 17}),
    "olmoe": ("Olmoe", {**GQA, "num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": ("GraniteMoe", {**GQA, **MULTIPLIERS, "num_local_experts": 4}),
    "glm4_moe": ("Glm4Moe", {**GQA_3, **MOE, "n_routed_experts": 8, "n_shared_experts": 2, "use_qk_norm": True}),
    "glm4_moe_groups": (
        "Glm4Moe",
        {
            **GQA_3,
            **MOE,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "attention_bias": True,
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**GQA_3, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "ernie_moe": ("Ernie4_5_Moe", {**GQA_3, "moe_intermediate_size": 24, "moe_k": 3, "moe_num_experts": 8}),
    "hunyuan_moe": ("HunYuanMoEV1", {**GQA_3, "num_experts": 4, "moe_topk": 2}),
    "gpt_oss": (
        "GptOss",
        {**GQA_8, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9, "swiglu_limit": 0.6},
    ),
}
CASES = {**FIRST, **DENSE, **FUSED, **OF_LAYER_NORM, **OF_EXPERTS}


def build(name: str, **sizes: Any) -> Any:
    """The transformers model of a case in float32; matrices have deviation `1/sqrt(in)`, vectors differ from 0 and 1."""
    family, changes = CASES[name]
    if family == "Qwen2":
        changes = {key: value for key, value in changes.items() if key != "head_dim"}  # Qwen2 has D / N
    shape = {**SIZES, **changes, **sizes}
    if family in ("GPT2", "OPT"):  # they have other keys for these, and would keep them
        del shape["intermediate_size"]
    config = getattr(transformers, f"{family}Config")(**shape)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            middle = parameter.mean() if parameter.ndim == 1 else 0.0
            parameter.copy_(middle + spread * torch.randn(parameter.shape, generator=generator))
            if key.endswith("embed_positions.weight"):
                parameter[:2] = 0  # the first rows of OPT, which no text reads
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def write(name: str, folder: Path, **sizes: Any) -> Any:
    """Saves the model of a case to `folder` by transformers; returns it."""
    model = build(name, **sizes)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2)
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """`num_new` greedy tokens after `prompt`, ignoring end of sequence."""
    return greedy_texts(model, [prompt], num_new)[0][len(prompt) :]


def greedy_texts(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """`prompts` of one length, each with `num_new` greedy tokens after it, ignoring end of sequence."""
    with torch.no_grad():
        return model.generate(torch.tensor(prompts), max_new_tokens=num_new, do_sample=False, eos_token_id=None).tolist()


def logits(model: Any, rows: list[list[int]]) -> np.ndarray:
    """Logits, float32 `[B, T, V]`, computed without a cache."""
    with torch.no_grad():
        return model(torch.tensor(rows), use_cache=False).logits.float().numpy()


def token_rows(num_rows: int, length: int = LENGTH) -> Iterator[list[int]]:
    """Sequences of token ids, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_rows):
        yield torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
