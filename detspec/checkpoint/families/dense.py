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
    SWITCH,
    Family,
    RopeKeys,
    inert,
    past_max_window_layers,
    sliding_pattern,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2 and 3.x, TinyLlama, SmolLM2, DeepSeek-R1-Distill-Llama",
    needs="",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",), "attention_bias": ("qkv_bias", "o_bias")},
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048},
    fixed={**FIXED, **NO_SLIDING},
    slides=lambda index, hf_config: False,
    names=LLAMA_NAMES,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B, Mistral Small 24B 2501, Codestral",
    needs="sliding window",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",)},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    fixed={**FIXED, "attention_bias": False, "layer_types": None},
    slides=lambda index, hf_config: hf_config.get("sliding_window") is not None,
    names=LLAMA_NAMES,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2 and 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    needs="biases of queries, keys and values, sliding layers",
    fields={**SIZE_FIELDS, "hidden_act": ("activation",)},
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        **SWITCH,
    },
    traits={"qkv_bias": True},
    fixed=FIXED,
    inert=inert("there are always biases, whatever it says", "attention_bias"),
    slides=past_max_window_layers,
    names=LLAMA_NAMES,
)
QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3 0.6B to 32B",
    needs="norms of query and key heads, sliding layers",
    fields=LLAMA.fields,
    defaults={**QWEN2.defaults, "head_dim": 128},
    traits={"qk_norm": True},
    inert={},
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    needs="norms before and after, 1 + w norms, soft caps, sliding layers",
    fields={**GEMMA_FIELDS, "attn_logit_softcapping": ("attn_softcap",)},
    defaults={
        "num_key_value_heads": 4,
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
    models="Gemma 3 (text)",
    needs="norms before and after, 1 + w norms, norms of query and key heads, a second rotary base",
    fields=GEMMA_FIELDS,
    defaults={**GEMMA2.defaults, "max_position_embeddings": 131072, **dict.fromkeys(SOFTCAP_KEYS)},
    traits={**GEMMA2.traits, "qk_norm": True},
    fixed={**GEMMA2.fixed, "attn_logit_softcapping": None},  # transformers reads it and does not apply it
    slides=lambda index, hf_config: (index + 1) % sliding_pattern(hf_config) != 0,
    rope=RopeKeys(theta=1e6, sliding_theta=1e4, sliding_theta_key="rope_local_base_freq"),
)
