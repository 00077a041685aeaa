"""Configs with the keys of published folders, the inert ones too: they are read, and are the presets of these models."""

import json
from typing import Any

import pytest

from detspec.checkpoint.hf_config import read_fields
from detspec.checkpoint.which_family import find_family
from detspec.config import RopeScaling
from detspec.errors import InputError
from detspec.model.dense import config_from_json, config_to_json, dense_config, for_long_texts
from detspec.model.params import num_params
from detspec.presets import preset

COMMON = {"torch_dtype": "bfloat16", "transformers_version": "4.50.0", "use_cache": True, "initializer_range": 0.02}


def sizes(layers: int, d_model: int, heads: int, kv_heads: int, d_ff: int, vocab: int, positions: int) -> dict[str, Any]:
    """The keys that most families share."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": d_model,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": d_ff,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "phi4": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **sizes(40, 5120, 40, 10, 17920, 100352, 16384),
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "glm4_9b": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        **sizes(40, 4096, 32, 2, 13696, 151552, 32768),
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "smollm3_3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **sizes(36, 2048, 16, 4, 11008, 128256, 65536),
        "attention_bias": False,
        "mlp_bias": False,
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "granite3_8b": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **sizes(40, 4096, 32, 8, 12800, 49159, 131072),
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "olmo2_7b": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **sizes(32, 4096, 32, 32, 11008, 100352, 4096),
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "pythia_6_9b": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "vocab_size": 50432,
        "tie_word_embeddings": False,
    },
    "qwen3_30b_a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **sizes(48, 2048, 32, 4, 6144, 151936, 40960),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **sizes(32, 4096, 32, 8, 14336, 32000, 32768),
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gpt_oss_20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **sizes(24, 2880, 64, 8, 2880, 201088, 131072),
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    "olmoe_1b_7b": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        **sizes(16, 2048, 16, 16, 1024, 50304, 4096),
        "attention_bias": False,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
    },
}
# Others, with their number of weights.
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "OPT 125M": (
        125_237_760,  # transformers counts two rows more, which no text reads
        {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "dropout": 0.1,
            "do_layer_norm_before": True,
            "ffn_dim": 3072,
            "hidden_size": 768,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "prefix": "</s>",
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        },
    ),
    "Phi-4 mini": (
        3_836_021_760,
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            **sizes(32, 3072, 24, 8, 8192, 200064, 131072),
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "GLM-4.5-Air": (
        106_852_251_264,  # without the layer that predicts further tokens
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **sizes(46, 4096, 96, 8, 10944, 151552, 131072),
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            "tie_word_embeddings": False,
        },
    ),
}


def read(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config of which nothing is unknown."""
    problems: list[str] = []
    family = find_family(config, problems)
    fields = read_fields({**COMMON, **config}, family, problems)
    assert problems == []
    return fields


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_is_the_preset(name):
    assert dense_config(**read(CONFIGS[name])) == preset(name)


@pytest.mark.parametrize("name", LARGE)
def test_published_config_has_the_number_of_weights(name):
    number, config = LARGE[name]
    assert num_params(dense_config(**read(config))) == number


def test_longrope_has_the_factors_for_texts_up_to_the_original_length():
    fields = read(LARGE["Phi-4 mini"][1])
    scaling = fields["rope_scaling"]
    assert (fields["max_position"], fields["rotary_dim"]) == (4096, 96)
    assert scaling == RopeScaling(
        "longrope",
        32.0,
        original_max_position=4096,
        attention_factor=scaling.attention_factor,
        short_factors=(1.0,) * 48,
        long_factors=(2.0,) * 48,
    )
    assert scaling.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)  # log 32 over log 4096
    cfg = for_long_texts(dense_config(**fields))
    assert (cfg.max_position, cfg.layer(0).mixer.rope.scaling.factors) == (131072, (2.0,) * 48)
    assert for_long_texts(cfg) == cfg
    assert config_from_json(json.loads(json.dumps(config_to_json(cfg)))) == cfg
    with pytest.raises(InputError, match="long_texts is for models whose rotations have other factors for long texts"):
        for_long_texts(preset("llama3_1_8b"))


@pytest.mark.parametrize(
    ("name", "changes", "culprit"),
    [
        ("gpt2", {"n_layer": 2**31 - 1}, "num_layers must be a positive integer, at most 1000"),
        ("gpt2", {"hidden_size": 700}, "n_embd and hidden_size contradict each other: [768, 700]"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true is not supported"),
        ("gpt2", {"rope_theta": 1e4}, 'unknown keys {"rope_theta": 10000.0}'),
        ("pythia_6_9b", {"partial_rotary_factor": 0.5}, 'unknown keys {"partial_rotary_factor": 0.5}'),
        ("pythia_6_9b", {"rotary_pct": 1.5}, "rotary_pct must be one number in 0 .. 1, got [1.5]"),
        (
            "pythia_6_9b",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rotary_pct must be one number in 0 .. 1, got [0.25, 0.5]",
        ),
        ("phi4", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "accepted rope types: default, longrope"),
        ("phi4", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "lacks short_factor"),
        ("smollm3_3b", {"no_rope_layers": [1, 0]}, "no_rope_layers must say 0 or 1 of each of the 36 layers"),
        ("smollm3_3b", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("qwen3_30b_a3b", {"num_experts": 10**9}, "MixtureOfExperts.num must be at most 1024, got 1000000000"),
        ("qwen3_30b_a3b", {"num_experts": 4}, "MixtureOfExperts.active (8) exceeds the 4 experts"),
        ("qwen3_30b_a3b", {"mlp_only_layers": list(range(48))}, "no layer has experts"),
        ("qwen3_30b_a3b", {"norm_topk_prob": "yes"}, "renormalised must be True or False"),
        ("mixtral_8x7b", {"num_experts": 4}, "num_local_experts and num_experts contradict each other"),
        ("olmoe_1b_7b", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("OPT 125M", {"word_embed_proj_dim": 512}, "embeddings of another width (512) than hidden_size (768)"),
        ("OPT 125M", {"do_layer_norm_before": False}, "do_layer_norm_before = false is not supported"),
        ("granite3_8b", {"model_type": "granitemoehybrid", "architectures": None}, "layers of Mamba are not supported"),
        ("smollm3_3b", {"model_type": "nanochat"}, "norms without weights"),
    ],
)
def test_config_that_makes_no_sense_or_is_not_supported_is_refused(name, changes, culprit):
    config = {**CONFIGS, **{key: value for key, (_, value) in LARGE.items()}}[name]
    problems: list[str] = []
    changed = {**COMMON, **config, **changes}
    family = find_family(changed, problems)
    if family is not None:
        read_fields(changed, family, problems)
    assert culprit in "; ".join(problems)
