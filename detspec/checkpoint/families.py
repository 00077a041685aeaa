"""Model families of Hugging Face: what the keys of their `config.json` mean, and what their tensors are called.

A new family is one more `Family`. Weights are not converted: matrices are `[out, in]` here as in every checkpoint, so a table
of names is enough.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from detspec.checkpoint.tensor_names import GEMMA_NAMES, LLAMA_NAMES, TensorNames

HfConfig = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` of Hugging Face maps to a `ModelConfig` and its parameters."""

    model_type: str  # the value of the config key `model_type`
    architecture: str  # the class in transformers that wrote the checkpoints
    fields: dict[str, tuple[str, ...]]  # config key -> fields of `ModelConfig` that it sets
    defaults: dict[str, Any]  # values of config keys that may be left out
    fixed: dict[str, Any]  # config keys that would change the computation -> the only value that is supported
    slides: Callable[[int, HfConfig], bool]  # by index, whether a layer slides where the config has no `layer_types`
    names: TensorNames  # the tensors of its checkpoints
    # fields of `ModelConfig` that are the same in every model of the family
    traits: dict[str, Any] = dataclasses.field(default_factory=dict)
    inert: frozenset[str] = frozenset()  # keys that mean something in other families alone
    rope_theta: float = 10000.0  # rotary base where the config has none
    sliding_rope_theta: float | None = None  # that of sliding layers; None if they share `rope_theta`


SIZE_FIELDS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("d_ff",),
    "rms_norm_eps": ("norm_eps",),
    "tie_word_embeddings": ("tie_embeddings",),
    "max_position_embeddings": ("max_position",),
}
GEMMA_FIELDS = {
    **SIZE_FIELDS,
    "attention_bias": ("qkv_bias", "o_bias"),
    "hidden_activation": ("activation",),
    "query_pre_attn_scalar": ("score_dim",),
    "final_logit_softcapping": ("logit_softcap",),
}

FIXED: dict[str, Any] = {
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "use_bidirectional_attention": False,
    "use_mrope": False,
}
NO_SLIDING = {"sliding_window": None, "sliding_window_size": None, "use_sliding_window": False, "layer_types": None}
PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")
SOFTCAP_KEYS = ("final_logit_softcapping", "attn_logit_softcapping")
# Keys for which null is a value; any other key that is null counts as left out.
NULLABLE = frozenset({"sliding_window", *SOFTCAP_KEYS})


def past_max_window_layers(index: int, hf_config: HfConfig) -> bool:
    """Qwen: whether layer `index` is one of the last, if any slide at all."""
    return bool(hf_config.get("use_sliding_window")) and index >= hf_config.get("max_window_layers", 28)


def sliding_pattern(hf_config: HfConfig) -> int:
    """Gemma 3: one layer in this many attends to all positions."""
    return next((hf_config[key] for key in PATTERN_KEYS if hf_config.get(key)), 6)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",), "attention_bias": ("qkv_bias", "o_bias")},
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048},
    fixed={**FIXED, **NO_SLIDING},
    slides=lambda index, hf_config: False,
    names=LLAMA_NAMES,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",)},
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131072, "sliding_window": 4096},
    fixed={**FIXED, "attention_bias": False, "layer_types": None},
    slides=lambda index, hf_config: hf_config.get("sliding_window") is not None,
    names=LLAMA_NAMES,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",)},
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768},
    traits={"qkv_bias": True},
    fixed=FIXED,
    inert=frozenset({"attention_bias"}),  # there are always biases, whatever it says
    slides=past_max_window_layers,
    names=LLAMA_NAMES,
)
QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=LLAMA.fields,
    defaults={**QWEN2.defaults, "head_dim": 128},
    traits={"qk_norm": True},
    inert=frozenset(),
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields={**GEMMA_FIELDS, "attn_logit_softcapping": ("attn_softcap",)},
    defaults={
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    traits={"post_norms": True, "norm_plus_one": True, "scale_embeddings": True},
    fixed={**FIXED, "hidden_act": "gelu_pytorch_tanh"},
    slides=lambda index, hf_config: index % 2 == 0,
    names=GEMMA_NAMES,
)
GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=GEMMA_FIELDS,
    defaults={**GEMMA2.defaults, "max_position_embeddings": 131072, **dict.fromkeys(SOFTCAP_KEYS)},
    traits={**GEMMA2.traits, "qk_norm": True},
    fixed={**GEMMA2.fixed, "attn_logit_softcapping": None},  # transformers reads it and does not apply it
    slides=lambda index, hf_config: (index + 1) % sliding_pattern(hf_config) != 0,
    rope_theta=1e6,
    sliding_rope_theta=1e4,
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)
