"""Named model shapes for benchmarks and planning with random weights: published ones of each family, and two of our own.

Published shapes come from the `config.json` files on Hugging Face. This module has no weights; `load` reads those.
"""

from typing import Any

from detspec.config import ModelConfig, RopeScaling
from detspec.errors import InputError

LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "rope_theta": 500000.0,
    "norm_eps": 1e-5,
    "max_position": 131072,
}
QWEN: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6}
GEMMA: dict[str, Any] = {
    "norm_eps": 1e-6,
    "tie_embeddings": True,
    "post_norms": True,
    "norm_plus_one": True,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
}
GEMMA_3: dict[str, Any] = {**GEMMA, "qk_norm": True, "rope_theta": 1e6, "sliding_rope_theta": 1e4}


def llama3_scaling(factor: float) -> RopeScaling:
    """Llama 3.1's RoPE scaling from 8192 original positions."""
    return RopeScaling("llama3", factor=factor, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def every_sixth_full(num_layers: int) -> tuple[bool, ...]:
    """Gemma 3's pattern: five sliding layers, then one with full attention."""
    return tuple((index + 1) % 6 != 0 for index in range(num_layers))


PRESETS = {
    # Our own shapes. Their heads are untied: with random weights a tied head would repeat the last token forever.
    # The shape of the shipped model: 3.9 M weights, which fit into the processor's cache.
    "tiny_python": ModelConfig(
        vocab_size=2048, d_model=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, d_ff=688, max_position=1024
    ),
    # 100.7 M weights, 201 MB: reading them takes most of a decode step.
    "random_100m": ModelConfig(
        vocab_size=16384, d_model=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, d_ff=2048, max_position=4096
    ),
    # Published shapes.
    "llama3_2_1b": ModelConfig(
        **LLAMA_3,
        d_model=2048,
        num_layers=16,
        num_heads=32,
        head_dim=64,
        d_ff=8192,
        tie_embeddings=True,
        rope_scaling=llama3_scaling(32.0),
    ),
    "llama3_1_8b": ModelConfig(
        **LLAMA_3, d_model=4096, num_layers=32, num_heads=32, head_dim=128, d_ff=14336, rope_scaling=llama3_scaling(8.0)
    ),
    "llama3_3_70b": ModelConfig(
        **LLAMA_3, d_model=8192, num_layers=80, num_heads=64, head_dim=128, d_ff=28672, rope_scaling=llama3_scaling(8.0)
    ),
    "mistral_7b": ModelConfig(  # v0.3, the first version without sliding layers
        vocab_size=32768,
        d_model=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        rope_theta=1e6,
        norm_eps=1e-5,
        max_position=32768,
    ),
    "qwen2_5_0_5b": ModelConfig(
        **QWEN,
        vocab_size=151936,
        d_model=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        d_ff=4864,
        tie_embeddings=True,
        max_position=32768,
        qkv_bias=True,
    ),
    "qwen2_5_7b": ModelConfig(
        **QWEN,
        vocab_size=152064,
        d_model=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        d_ff=18944,
        max_position=131072,
        qkv_bias=True,
    ),
    "qwen3_0_6b": ModelConfig(
        **QWEN,
        vocab_size=151936,
        d_model=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        d_ff=3072,
        tie_embeddings=True,
        max_position=40960,
        qk_norm=True,
    ),
    "qwen3_8b": ModelConfig(
        **QWEN,
        vocab_size=151936,
        d_model=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=12288,
        max_position=40960,
        qk_norm=True,
    ),
    "gemma2_2b": ModelConfig(
        **GEMMA,
        vocab_size=256000,
        d_model=2304,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        d_ff=9216,
        max_position=8192,
        score_dim=256,
        attn_softcap=50.0,
        logit_softcap=30.0,
        sliding_window=4096,
        sliding_layers=(True, False) * 13,
    ),
    "gemma3_1b": ModelConfig(
        **GEMMA_3,
        vocab_size=262144,
        d_model=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        d_ff=6912,
        max_position=32768,
        score_dim=256,
        sliding_window=512,
        sliding_layers=every_sixth_full(26),
    ),
    "gemma3_4b": ModelConfig(
        **GEMMA_3,
        vocab_size=262208,
        d_model=2560,
        num_layers=34,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        d_ff=10240,
        max_position=131072,
        score_dim=256,
        rope_scaling=RopeScaling("linear", factor=8.0),
        sliding_window=1024,
        sliding_layers=every_sixth_full(34),
    ),
    "gemma3_27b": ModelConfig(
        **GEMMA_3,
        vocab_size=262208,
        d_model=5376,
        num_layers=62,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        d_ff=21504,
        max_position=131072,
        score_dim=168,
        rope_scaling=RopeScaling("linear", factor=8.0),
        sliding_window=1024,
        sliding_layers=every_sixth_full(62),
    ),
}


def preset(name: str) -> ModelConfig:
    """The model shape named `name`; `InputError` if no preset has this name."""
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; accepted are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
