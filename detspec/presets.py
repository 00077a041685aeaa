"""Named model shapes for benchmarks and planning with random weights: published ones of each family, and three of our own.

Published shapes come from the `config.json` files on Hugging Face. This module has no weights; `load` reads those.
"""

from typing import Any

from detspec.config import ModelConfig, RopeScaling
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.experts import MixtureOfExperts

SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "max_position")
LLAMA_3: dict[str, Any] = {"rope_theta": 500000.0, "norm_eps": 1e-5}
QWEN: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6}
GEMMA: dict[str, Any] = {
    **dict.fromkeys(("tie_embeddings", "post_norms", "norm_plus_one", "scale_embeddings"), True),
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
}
GEMMA_2: dict[str, Any] = {**GEMMA, "attn_softcap": 50.0, "logit_softcap": 30.0, "sliding_window": 4096}
GEMMA_3: dict[str, Any] = {**GEMMA, "qk_norm": True, "rope_theta": 1e6, "sliding_rope_theta": 1e4}
LONG_GEMMA: dict[str, Any] = {**GEMMA_3, "rope_scaling": RopeScaling("linear", factor=8.0), "sliding_window": 1024}


GLM_4: dict[str, Any] = {
    **dict.fromkeys(("post_norms", "rope_interleaved", "qkv_bias"), True),
    "norm_eps": 1e-5,
    "rotary_dim": 64,
}
GRANITE_3: dict[str, Any] = {
    "rope_theta": 1e7,
    "norm_eps": 1e-5,
    "tie_embeddings": True,
    "embed_scale": 12.0,
    "residual_scale": 0.22,
    "score_scale": 0.0078125,
    "logit_divisor": 16.0,
}
SMOLLM_3: dict[str, Any] = {
    "rope_theta": 5e6,
    "norm_eps": 1e-6,
    "tie_embeddings": True,
    "unrotated_layers": (False, False, False, True) * 9,
}
WIDE_NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_of": "width"}
OLMO_2: dict[str, Any] = {**WIDE_NORMS, "rope_theta": 500000.0, "norm_eps": 1e-6, "pre_norms": False, "post_norms": True}
LAYER_NORM: dict[str, Any] = {
    **dict.fromkeys(("norm_bias", "qkv_bias", "o_bias", "mlp_bias"), True),
    "norm": "layer",
    "gated": False,
    "norm_eps": 1e-5,
}
GPT_2: dict[str, Any] = {
    **LAYER_NORM,
    "activation": "gelu_tanh",
    "tie_embeddings": True,
    "learned_positions": True,
    "position_encoding": "none",
}
PYTHIA: dict[str, Any] = {**LAYER_NORM, "activation": "gelu", "parallel": True, "rotary_dim": 32}
SMALL_EXPERTS = MixtureOfExperts(32, 8, 256, renormalised=True)
QWEN_EXPERTS = MixtureOfExperts(128, 8, 768, renormalised=True)
MIXTRAL_EXPERTS = MixtureOfExperts(8, 2, 14336, renormalised=True)
GPT_OSS: dict[str, Any] = {
    **dict.fromkeys(("qkv_bias", "o_bias", "sinks"), True),
    "rope_theta": 150000.0,
    "rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False, attention_factor=1.3465735902799727),
    "sliding_window": 128,
    "norm_eps": 1e-5,
    "experts": MixtureOfExperts(32, 4, 2880, score="chosen", bias=True, clamp=7.0),
}
OLMO_EXPERTS = MixtureOfExperts(64, 8, 1024)


def llama3_scaling(factor: float) -> RopeScaling:
    """Llama 3.1's RoPE scaling from 8192 original positions."""
    return RopeScaling("llama3", factor=factor, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def sixth_full(num_layers: int) -> tuple[bool, ...]:
    """Gemma 3's pattern: five sliding layers, then one with full attention."""
    return tuple((index + 1) % 6 != 0 for index in range(num_layers))


def model(*sizes: int, **traits: Any) -> ModelConfig:
    """A model of `SIZES`, in this order, with the `traits` of its family."""
    return dense_config(**{**dict(zip(SIZES, sizes, strict=True)), **traits})


PRESETS = {
    # Our own shapes. Their heads are untied: with random weights a tied head would repeat the last token forever.
    # The shape of the shipped model: 3.9 M weights, which fit into the processor's cache.
    "tiny_python": model(4, 256, 4, 2, 64, 688, 2048, 1024),
    # 100.7 M weights, 201 MB: reading them takes most of a decode step.
    "random_100m": model(12, 768, 12, 4, 64, 2048, 16384, 4096),
    # 311.8 M weights, 624 MB, of which a row takes 99 M.
    "random_moe_300m": model(14, 768, 12, 4, 64, 256, 16384, 4096, **QWEN, qk_norm=True, experts=SMALL_EXPERTS),
    # Published shapes.
    "llama3_2_1b": model(
        16, 2048, 32, 8, 64, 8192, 128256, 131072, **LLAMA_3, tie_embeddings=True, rope_scaling=llama3_scaling(32.0)
    ),
    "llama3_1_8b": model(32, 4096, 32, 8, 128, 14336, 128256, 131072, **LLAMA_3, rope_scaling=llama3_scaling(8.0)),
    "llama3_3_70b": model(80, 8192, 64, 8, 128, 28672, 128256, 131072, **LLAMA_3, rope_scaling=llama3_scaling(8.0)),
    # Mistral v0.3 is the first version without sliding layers.
    "mistral_7b": model(32, 4096, 32, 8, 128, 14336, 32768, 32768, rope_theta=1e6, norm_eps=1e-5),
    "qwen2_5_0_5b": model(24, 896, 14, 2, 64, 4864, 151936, 32768, **QWEN, tie_embeddings=True, qkv_bias=True),
    "qwen2_5_7b": model(28, 3584, 28, 4, 128, 18944, 152064, 131072, **QWEN, qkv_bias=True),
    "qwen3_0_6b": model(28, 1024, 16, 8, 128, 3072, 151936, 40960, **QWEN, tie_embeddings=True, qk_norm=True),
    "qwen3_8b": model(36, 4096, 32, 8, 128, 12288, 151936, 40960, **QWEN, qk_norm=True),
    "gemma2_2b": model(26, 2304, 8, 4, 256, 9216, 256000, 8192, **GEMMA_2, score_dim=256, sliding_layers=(True, False) * 13),
    "gemma3_1b": model(
        26, 1152, 4, 1, 256, 6912, 262144, 32768, **GEMMA_3, score_dim=256, sliding_window=512, sliding_layers=sixth_full(26)
    ),
    "gemma3_4b": model(34, 2560, 8, 4, 256, 10240, 262208, 131072, **LONG_GEMMA, score_dim=256, sliding_layers=sixth_full(34)),
    "gemma3_27b": model(
        62, 5376, 32, 16, 128, 21504, 262208, 131072, **LONG_GEMMA, score_dim=168, sliding_layers=sixth_full(62)
    ),
    "phi4": model(40, 5120, 40, 10, 128, 17920, 100352, 16384, rope_theta=250000.0, norm_eps=1e-5),
    # GLM-4-9B-0414 and Granite 3.3.
    "glm4_9b": model(40, 4096, 32, 2, 128, 13696, 151552, 32768, **GLM_4),
    "granite3_8b": model(40, 4096, 32, 8, 128, 12800, 49159, 131072, **GRANITE_3),
    "smollm3_3b": model(36, 2048, 16, 4, 128, 11008, 128256, 65536, **SMOLLM_3),
    "olmo2_7b": model(32, 4096, 32, 32, 128, 11008, 100352, 4096, **OLMO_2),
    "gpt2": model(12, 768, 12, 12, 64, 3072, 50257, 1024, **GPT_2),
    "pythia_6_9b": model(32, 4096, 32, 32, 128, 16384, 50432, 2048, **PYTHIA),
    # In the shapes of Qwen and OLMo, whose layers all have experts, `d_ff` is the width of one expert.
    "qwen3_30b_a3b": model(48, 2048, 32, 4, 128, 768, 151936, 40960, **QWEN, qk_norm=True, experts=QWEN_EXPERTS),
    "mixtral_8x7b": model(32, 4096, 32, 8, 128, 14336, 32000, 32768, rope_theta=1e6, norm_eps=1e-5, experts=MIXTRAL_EXPERTS),
    "gpt_oss_20b": model(24, 2880, 64, 8, 64, 2880, 201088, 131072, **GPT_OSS, sliding_layers=(True, False) * 12),
    "olmoe_1b_7b": model(16, 2048, 16, 16, 128, 1024, 50304, 4096, **WIDE_NORMS, norm_eps=1e-5, experts=OLMO_EXPERTS),
}


def preset(name: str) -> ModelConfig:
    """The model shape named `name`; `InputError` if no preset has this name."""
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; accepted are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
