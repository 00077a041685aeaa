"""Dense decoders with RMSNorm: Llama, Mistral, Qwen, Gemma."""

import dataclasses

from detspec.checkpoint.families.family import (
    FIXED,
    GEMMA_FIELDS,
    GEMMA_NAMES,
    LLAMA_NAMES,
    NO_SLIDING,
    SIZE_FIELDS,
    SOFTCAP_KEYS,
    Family,
    past_max_window_layers,
    sliding_pattern,
)

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
