"""Decoders with LayerNorm: GPT-2, GPT-NeoX, OPT, Nemotron, StarCoder2."""

import dataclasses

from detspec.checkpoint.families.dense import LLAMA, MISTRAL
from detspec.checkpoint.families.family import (
    FIXED,
    LAYER_NAMES,
    LLAMA_NAMES,
    MLP_NAMES,
    NO_SLIDING,
    NORM_BIASES,
    SIZE_FIELDS,
    Fields,
    HfConfig,
    RopeKeys,
    Rule,
    TensorNames,
    inert,
    respelled,
    with_biases,
    without,
)
from detspec.checkpoint.layout import Layout, in_layer
from detspec.config import ModelConfig

LAYER_NORM = {"norm": "layer", "norm_bias": True, "gated": False}
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
NEMOTRON = dataclasses.replace(
    LLAMA,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    models="Nemotron-4, Minitron 4B and 8B",
    needs="LayerNorm that multiplies by 1 + w, an MLP without a gate, relu squared, heads rotated in part",
    fields={**without(LLAMA.fields, "rms_norm_eps"), "norm_eps": ("norm_eps",)},
    defaults={"norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 4096, "hidden_act": "relu2"},
    fixed=without({**FIXED, **NO_SLIDING}, "partial_rotary_factor"),
    traits={**LAYER_NORM, "norm_plus_one": True},
    names={**LLAMA_NAMES, **NORM_BIASES},
    rope=RopeKeys(share=0.5),
)
STARCODER2 = dataclasses.replace(
    MISTRAL,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2 3B to 15B",
    needs="LayerNorm, biases, an MLP without a gate, sliding window",
    fields={
        **without(SIZE_FIELDS, "rms_norm_eps"),
        "norm_epsilon": ("norm_eps",),
        "hidden_act": ("activation",),
        "use_bias": tuple(BIASED),
    },
    defaults={
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
        "use_bias": True,
    },
    fixed={**FIXED, "layer_types": None, "mlp_type": "default", "norm_type": "layer_norm"},
    traits=LAYER_NORM,
    inert=inert("training alone", "residual_dropout embedding_dropout"),
    names={
        **without(LLAMA_NAMES, *MLP_NAMES),
        **NORM_BIASES,
        **with_biases("model.layers.{}.mlp.", {"c_fc": "up", "c_proj": "down"}),
    },
)


def read_inner(hf_config: HfConfig, fields: Fields) -> Fields:
    """GPT-2: the MLP is four times as wide as the stream unless `n_inner` says otherwise."""
    inner = hf_config.get("n_inner")
    return {"d_ff": 4 * fields["d_model"] if inner is None else inner}


def turned(name: str, *leaves: str) -> TensorNames:
    """GPT-2: a matrix `[in, out]` that holds these weights, and their biases."""
    layer = f"transformer.h.{{}}.{name}"
    return {f"{layer}.weight": in_layer(*leaves, turned=True), f"{layer}.bias": in_layer(*(f"{leaf}_bias" for leaf in leaves))}


GPT2 = dataclasses.replace(
    LLAMA,
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models="GPT-2 small to XL, DistilGPT-2",
    needs="LayerNorm, biases, learned positions, an MLP without a gate, matrices `[in, out]`, fused queries, keys and values",
    fields={
        "vocab_size": ("vocab_size",),
        "n_embd": ("d_model",),
        "n_layer": ("num_layers",),
        "n_head": ("num_heads",),
        "n_positions": ("max_position",),
        "layer_norm_epsilon": ("norm_eps",),
        "activation_function": ("activation",),
        "tie_word_embeddings": ("tie_embeddings",),
    },
    defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    fixed={
        **FIXED,
        **NO_SLIDING,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    traits={**LAYER_NORM, **BIASED, "learned_positions": True, "position_encoding": "none"},
    rules=(Rule(frozenset({"n_inner"}), read_inner, lambda flat: {"n_inner": flat["d_ff"]}),),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    inert={
        **inert("n_positions says it", "n_ctx"),
        **inert(
            "a head for classification",
            "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
        ),
    },
    rope=None,
    names={
        "transformer.wte.weight": ("embed",),
        "transformer.wpe.weight": ("positions",),
        **with_biases("transformer.h.{}.", {"ln_1": "attn_norm"}),
        **turned("attn.c_attn", "q", "k", "v"),
        **turned("attn.c_proj", "o"),
        **with_biases("transformer.h.{}.", {"ln_2": "mlp_norm"}),
        **turned("mlp.c_fc", "up"),
        **turned("mlp.c_proj", "down"),
        "transformer.ln_f.weight": ("final_norm",),
        "transformer.ln_f.bias": ("final_norm_bias",),
        "lm_head.weight": ("head",),
    },
    variants=(respelled({"transformer.": ""}),),  # published folders
    buffers=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)


def neox_names(cfg: ModelConfig) -> TensorNames:
    """GPT-NeoX: queries, keys and values lie in turns, a head of each."""
    head_dim = cfg.kinds[0].mixer.head_dim
    fused = "gpt_neox.layers.{}.attention.query_key_value"
    single = {
        "input_layernorm": "attn_norm",
        "attention.dense": "o",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "up",
        "mlp.dense_4h_to_h": "down",
    }
    return {
        "gpt_neox.embed_in.weight": ("embed",),
        f"{fused}.weight": in_layer("q", "k", "v", turn=head_dim),
        f"{fused}.bias": in_layer("q_bias", "k_bias", "v_bias", turn=head_dim),
        **with_biases("gpt_neox.layers.{}.", single),
        "gpt_neox.final_layer_norm.weight": ("final_norm",),
        "gpt_neox.final_layer_norm.bias": ("final_norm_bias",),
        "embed_out.weight": ("head",),
    }


GPT_NEOX = dataclasses.replace(
    LLAMA,
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    models="Pythia 14M to 12B, GPT-NeoX 20B",
    needs="LayerNorm, biases, attention and MLP in parallel, heads rotated in part, fused queries, keys and values",
    fields={
        **without(SIZE_FIELDS, "rms_norm_eps", "num_key_value_heads", "head_dim"),
        "layer_norm_eps": ("norm_eps",),
        "hidden_act": ("activation",),
        "attention_bias": ("qkv_bias", "o_bias"),
        "use_parallel_residual": ("parallel",),
    },
    defaults={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    fixed=without({**FIXED, **NO_SLIDING}, "partial_rotary_factor", "mlp_bias"),
    traits={**LAYER_NORM, "mlp_bias": True},
    inert=inert("training alone", "classifier_dropout"),
    rope=RopeKeys(theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct"),
    names=neox_names,
    buffers=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)


def read_projection(hf_config: HfConfig, fields: Fields) -> Fields:
    """OPT: embeddings of another width than the stream (350M) are not supported."""
    if (width := hf_config.get("word_embed_proj_dim")) not in (None, fields["d_model"]):
        raise ValueError(f"embeddings of another width ({width}) than hidden_size ({fields['d_model']}) are not supported")
    return {}


OPT = dataclasses.replace(
    LLAMA,
    model_type="opt",
    architecture="OPTForCausalLM",
    models="OPT 125M to 66B but for 350M, Galactica",
    needs="LayerNorm, biases, learned positions, an MLP without a gate, relu",
    fields={
        **without(SIZE_FIELDS, "rms_norm_eps", "num_key_value_heads", "head_dim", "intermediate_size"),
        "ffn_dim": ("d_ff",),
        "activation_function": ("activation",),
        "enable_bias": tuple(BIASED),
    },
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048, "activation_function": "relu", "enable_bias": True},
    fixed={
        **FIXED,
        **NO_SLIDING,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    },
    traits={**LAYER_NORM, "norm_eps": 1e-5, "learned_positions": True, "position_encoding": "none"},
    rules=(Rule(frozenset({"word_embed_proj_dim"}), read_projection, lambda flat: {"word_embed_proj_dim": flat["d_model"]}),),
    inert=inert("training alone", "dropout activation_dropout layerdrop init_std"),
    rope=None,
    names={
        "model.decoder.embed_tokens.weight": ("embed",),
        "model.decoder.embed_positions.weight": Layout((("positions",),), skipped=2),
        **{
            name.replace("model.", "model.decoder.").replace("o_proj", "out_proj"): path
            for name, path in LAYER_NAMES.items()
            if "self_attn" in name
        },
        **with_biases("model.decoder.layers.{}.", {"self_attn_layer_norm": "attn_norm", "final_layer_norm": "mlp_norm"}),
        **with_biases("model.decoder.layers.{}.", {"fc1": "up", "fc2": "down"}),
        "model.decoder.final_layer_norm.weight": ("final_norm",),
        "model.decoder.final_layer_norm.bias": ("final_norm_bias",),
        "lm_head.weight": ("head",),
    },
    variants=(respelled({"model.decoder.": "decoder."}),),
)
