"""Model families of Hugging Face: what the keys of their `config.json` mean, and how their tensors are called.

A new family is one more `Family`. Weights are not converted: matrices are `[out, in]` here as in every checkpoint, so a table
of names is enough.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from detspec.config import ModelConfig

HfConfig = dict[str, Any]

# Name of a tensor -> path in the pytree. The `{}` of a path is the index of the layer. A name with one `{}` more than its path
# names the parts of a stacked weight along its first axis; here down is `[E, D, F]`, made of E tensors `[D, F]`:
#
#     "model.layers.{}.mlp.experts.{}.down_proj.weight": ("layers", "{}", "experts", "down")
TensorNames = dict[str, tuple[str, ...]]

EMBEDDING: TensorNames = {"model.embed_tokens.weight": ("embed",)}
LAYER_NAMES: TensorNames = {
    "model.layers.{}.input_layernorm.weight": ("layers", "{}", "attn_norm"),
    "model.layers.{}.self_attn.q_proj.weight": ("layers", "{}", "q"),
    "model.layers.{}.self_attn.q_proj.bias": ("layers", "{}", "q_bias"),
    "model.layers.{}.self_attn.k_proj.weight": ("layers", "{}", "k"),
    "model.layers.{}.self_attn.k_proj.bias": ("layers", "{}", "k_bias"),
    "model.layers.{}.self_attn.v_proj.weight": ("layers", "{}", "v"),
    "model.layers.{}.self_attn.v_proj.bias": ("layers", "{}", "v_bias"),
    "model.layers.{}.self_attn.o_proj.weight": ("layers", "{}", "o"),
    "model.layers.{}.self_attn.o_proj.bias": ("layers", "{}", "o_bias"),
    "model.layers.{}.self_attn.q_norm.weight": ("layers", "{}", "q_norm"),
    "model.layers.{}.self_attn.k_norm.weight": ("layers", "{}", "k_norm"),
    "model.layers.{}.mlp.gate_proj.weight": ("layers", "{}", "gate"),
    "model.layers.{}.mlp.up_proj.weight": ("layers", "{}", "up"),
    "model.layers.{}.mlp.down_proj.weight": ("layers", "{}", "down"),
}
OUTPUT: TensorNames = {"model.norm.weight": ("final_norm",), "lm_head.weight": ("head",)}
# Llama has two norms in a layer, each before what it feeds. Gemma has four; one name means another norm there.
LLAMA_NAMES: TensorNames = {
    **EMBEDDING,
    **LAYER_NAMES,
    "model.layers.{}.post_attention_layernorm.weight": ("layers", "{}", "mlp_norm"),
    **OUTPUT,
}
GEMMA_NAMES: TensorNames = {
    **EMBEDDING,
    **LAYER_NAMES,
    "model.layers.{}.post_attention_layernorm.weight": ("layers", "{}", "attn_post_norm"),
    "model.layers.{}.pre_feedforward_layernorm.weight": ("layers", "{}", "mlp_norm"),
    "model.layers.{}.post_feedforward_layernorm.weight": ("layers", "{}", "mlp_post_norm"),
    **OUTPUT,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` of Hugging Face maps to a `ModelConfig` and its parameters."""

    model_type: str  # the value of the config key `model_type`
    architecture: str  # the class in transformers that wrote the checkpoints
    fields: dict[str, tuple[str, ...]]  # config key -> fields of `dense_config` that it sets
    defaults: dict[str, Any]  # values of config keys that may be left out
    fixed: dict[str, Any]  # config keys that would change the computation -> the only value that is supported
    slides: Callable[[int, HfConfig], bool]  # by index, whether a layer slides where the config has no `layer_types`
    names: TensorNames  # the tensors of its checkpoints
    # fields of `dense_config` that are the same in every model of the family
    traits: dict[str, Any] = dataclasses.field(default_factory=dict)
    inert: frozenset[str] = frozenset()  # keys that mean something in other families alone
    rope_theta: float = 10000.0  # rotary base where the config has none
    sliding_rope_theta: float | None = None  # that of sliding layers; None if they share `rope_theta`
    # Changes the kinds of layers and their pattern, where the family has others than a dense model: takes that, and the config.
    layers: Callable[[ModelConfig, HfConfig], ModelConfig] = lambda cfg, hf_config: cfg
    layer_keys: frozenset[str] = frozenset()  # config keys that `layers` reads


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

# Keys that do not change the logits in any family: where they come from, or why they are passed over -> which they are. Keys of
# which some values would matter are not here: `FIXED` names the one value that is supported. `pretraining_tp` is in how many
# parts transformers 4 cut matrices.
INERT = {
    "they name the family, which is looked up first": """
        model_type architectures
    """,
    "where a checkpoint comes from and which program wrote it": """
        _name_or_path _model_name_or_path name_or_path _commit_hash transformers_version finetuning_task unsloth_fixed
        unsloth_version is_llama_config
    """,
    "code and settings that other programs would take; the architecture is one of those that are known here": """
        auto_map transformers.js_config
    """,
    "the tokenizer's; eos_token_id is read where a text ends": """
        bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix
        model_max_length tokenizer_model_max_length tokenizer_padding_side
    """,
    "lengths of training (LLaMA 1 and its fine-tunes); max_position_embeddings is the one that models have": """
        max_sequence_length max_seq_len seq_length
    """,
    "settings of generation from before there was a generation_config.json; a request says how it is sampled": """
        max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff penalty_alpha repetition_penalty
        encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens use_cache
        cache_implementation
    """,
    "training alone: initial weights, dropout, losses, memory of gradients": """
        attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob
        attention_probs_dropout_prob initializer_range gradient_checkpointing use_gradient_checkpointing
        tf_legacy_loss keys_to_ignore_at_inference
    """,
    "classifiers' and tasks' settings, which transformers writes for every model; a classifier has another architecture": """
        id2label label2id num_labels _num_labels problem_type task_specific_params
    """,
    "how transformers computes the same numbers": """
        attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
        _flash_attn_2_enabled use_flash_attention_2 chunk_size_feed_forward pretraining_tp torchscript use_bfloat16
    """,
    "what a call of transformers returns": """
        output_attentions output_hidden_states return_dict use_return_dict
    """,
    "whether an encoder of the BERT kind may look ahead; these families never do": """
        is_decoder
    """,
}
INERT_KEYS = {key: reason for reason, keys in INERT.items() for key in keys.split()}
