"""Tiny random models of six families, as folders of Hugging Face: no shape of ours is named, so any commit can load them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, **HEADS}
COMMON = {**SIZES, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "dtype": "float32"}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
# What makes each family, and each way to stretch rotations: sliding windows are shorter than a prompt, and than a page.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 64},
        "attention_bias": True,
        "dtype": "bfloat16",
    },
    "mistral": {**COMMON, "model_type": "mistral", "sliding_window": 24},
    "qwen2": {
        **COMMON,
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rope_scaling": YARN_ROPE,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 2,
    },
    "qwen3": {**COMMON, "model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True, "dtype": "bfloat16"},
    "gemma2": {**COMMON, **GEMMA, "model_type": "gemma2", "sliding_window": 16},
    "gemma3": {
        **COMMON,
        **GEMMA,
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "rope_scaling": LINEAR_ROPE,
    },
    # drafts for the shipped model, whose vocabulary it has
    "drafter": {**COMMON, "model_type": "llama", "vocab_size": 2048, "num_hidden_layers": 1},
}


def write_model(name: str) -> str:
    """Writes the model called `name` into the working folder, unless it is there, and returns its folder."""
    folder = Path("models") / name
    if not folder.exists():
        folder.mkdir(parents=True)
        config = CONFIGS[name]
        save_file(_tensors(config, np.random.default_rng(sum(name.encode()))), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _tensors(config: dict[str, Any], rng: np.random.Generator) -> Tensors:
    """Random weights with the names and shapes that Hugging Face gives them, in float32; loading rounds them."""
    D, F, V = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    H = config["head_dim"]
    queries, keys = (H * config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    kind = config["model_type"]
    is_gemma = kind.startswith("gemma")
    norms = ["input", "post_attention", *(["pre_feedforward", "post_feedforward"] if is_gemma else [])]
    tensors: Tensors = {"model.embed_tokens.weight": _normal(rng, V, D)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in norms:
            tensors[f"{prefix}.{norm}_layernorm.weight"] = _norm(rng, D, is_gemma)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] = _normal(rng, rows, D)
            if kind == "qwen2" or config.get("attention_bias"):
                tensors[f"{prefix}.self_attn.{part}_proj.bias"] = _normal(rng, rows)
        if config.get("attention_bias"):
            tensors[f"{prefix}.self_attn.o_proj.bias"] = _normal(rng, D)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = _normal(rng, D, queries)
        if kind in ("qwen3", "gemma3_text"):
            tensors |= {f"{prefix}.self_attn.{part}_norm.weight": _norm(rng, H, is_gemma) for part in "qk"}
        for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            tensors[f"{prefix}.mlp.{part}_proj.weight"] = _normal(rng, *shape)
    tensors["model.norm.weight"] = _norm(rng, D, is_gemma)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = 2 * _normal(rng, V, D)
    return tensors


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)


def _norm(rng: np.random.Generator, size: int, plus_one: bool) -> np.ndarray:
    return ((0 if plus_one else 1) + 0.1 * rng.standard_normal(size)).astype(np.float32)
