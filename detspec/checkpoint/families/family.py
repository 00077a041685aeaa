"""`Family`: how one model type of Hugging Face maps to a `ModelConfig`; and the keys and names that many of them share."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from detspec.checkpoint.layout import Layout, in_layer
from detspec.config import ModelConfig

HfConfig = dict[str, Any]
Fields = dict[str, Any]  # of `dense_config`

# Name of a tensor -> path of a weight in the pytree, or the `Layout` of a tensor that holds several, or one in another way:
#
#     "model.layers.{}.self_attn.qkv_proj.weight": in_layer("q", "k", "v")                 [q; k; v]
#     "transformer.h.{}.attn.c_attn.weight": in_layer("q", "k", "v", turned=True)          [in, out]
#     "model.layers.{}.mlp.experts.gate_up_proj": in_layer("gate", "up", axis=1, turn=1, turned=True)   [E, in, 2F] in turns
#
# The `{}` of a path is the index of the layer. A name with one `{}` more than its path names the parts of stacked weights along
# their first axis; here down is `[E, D, F]`, made of E tensors `[D, F]`:
#
#     "model.layers.{}.mlp.experts.{}.down_proj.weight": ("layers", "{}", "experts_down")
#
# A tensor that holds weights of which the model lacks one is none of its tensors.
TensorNames = dict[str, tuple[str, ...] | Layout]

# Buffers that the config decides: rotary frequencies and tables, of a layer or of the model (Gemma 3 has some for each kind of
# layers), and Gemma's scale of embeddings. Some programs store them, and they are not read.
BUFFERS = r".+\.rotary_emb(_local)?\.(\w+_)?(inv_freq|cos_cached|sin_cached)|.+\.embed_tokens\.embed_scale"

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


MLP_NAMES = [name for name in LAYER_NAMES if ".mlp." in name]
NORM_BIASES: TensorNames = {
    "model.layers.{}.input_layernorm.bias": ("layers", "{}", "attn_norm_bias"),
    "model.layers.{}.post_attention_layernorm.bias": ("layers", "{}", "mlp_norm_bias"),
    "model.norm.bias": ("final_norm_bias",),
}


def without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Returns `table` but for some of its keys."""
    return {key: value for key, value in table.items() if key not in keys}


def with_biases(prefix: str, leaves: dict[str, str]) -> TensorNames:
    """Names of weights and biases: `prefix`, then one of these names -> the leaf of a layer."""
    kinds = (("weight", ""), ("bias", "_bias"))
    return {
        f"{prefix}{name}.{kind}": ("layers", "{}", leaf + suffix) for name, leaf in leaves.items() for kind, suffix in kinds
    }


# One tensor holds the rows of the gate, then those of up.
FUSED_GATE_NAMES: TensorNames = {
    **without(LLAMA_NAMES, *MLP_NAMES[:2]),
    "model.layers.{}.mlp.gate_up_proj.weight": in_layer("gate", "up"),
}


@dataclasses.dataclass(frozen=True)
class RopeKeys:
    """Config keys of rotary positions, and the values that hold where they are left out."""

    theta: float = 10000.0  # base
    theta_key: str = "rope_theta"
    sliding_theta: float | None = None  # unscaled base of sliding layers; None if they share the base and the scaling
    sliding_theta_key: str | None = None
    share: float | None = None  # part of a head's places that is rotated; None if there is no key and all are
    share_key: str = "partial_rotary_factor"
    size_key: str | None = None  # the key for how many places are rotated, where there is one besides
    kinds: tuple[str, ...] = ("linear", "llama3", "yarn")  # rope types besides "default"
    default: dict[str, Any] | None = None  # the setting where the config has none
    alpha: bool = False  # the type "dynamic" with `alpha` raises the base once and for all (Hunyuan)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Reads fields from several config keys together, and writes these keys.

    `read` takes the config, with defaults, and the fields that are known so far. It raises if the keys make no sense. `write`
    takes all flat fields, of any model.
    """

    keys: frozenset[str]
    read: Callable[[HfConfig, Fields], Fields]
    write: Callable[[Fields], HfConfig]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` of Hugging Face maps to a `ModelConfig` and its parameters."""

    model_type: str  # the value of the config key `model_type`
    architecture: str  # the class in transformers that wrote the checkpoints
    models: str  # names that people know
    needs: str  # how its layers differ from those of Llama
    fields: dict[str, tuple[str, ...]]  # config key -> fields of `dense_config` that it sets
    defaults: dict[str, Any]  # values of config keys that may be left out
    fixed: dict[str, Any]  # config keys that would change the computation -> the only value that is supported
    slides: Callable[[int, HfConfig], bool]  # by index, whether a layer slides where the config has no `layer_types`
    names: TensorNames | Callable[[ModelConfig], TensorNames]  # the tensors of its checkpoints, or those of a model
    # fields of `dense_config` that are the same in every model of the family
    traits: dict[str, Any] = dataclasses.field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # other names of config keys -> the names above
    inert: dict[str, str] = dataclasses.field(default_factory=dict)  # keys that change nothing in this family -> the reason
    rope: RopeKeys | None = RopeKeys()  # None if it rotates nothing and has no such keys
    # Each turns `names` into what some folders have instead; those that most tensors of a folder are in are taken.
    variants: tuple[Callable[[TensorNames], TensorNames], ...] = ()
    buffers: str = BUFFERS  # tensors that are passed over, as a regular expression
    towers: str = ""  # those of parts that are no text, likewise
    predicted: str | None = None  # the key for how many layers after the last one predict further tokens, and are left out

    def tensor_names(self, cfg: ModelConfig) -> TensorNames:
        """The tensors of `cfg` as transformers writes them."""
        return self.names(cfg) if callable(self.names) else self.names

    def is_buffer(self, name: str) -> bool:
        """Whether the tensor says nothing that the config does not say."""
        return re.fullmatch(self.buffers, name) is not None

    def is_of_tower(self, name: str) -> bool:
        """Whether the tensor belongs to a part of the model that is no text."""
        return re.fullmatch(self.towers, name) is not None


def respelled(prefixes: dict[str, str]) -> Callable[[TensorNames], TensorNames]:
    """Makes a table whose names begin otherwise: `{"transformer.": ""}` drops that; other names stay as they are."""

    def respell(name: str) -> str:
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return name if old is None else prefixes[old] + name.removeprefix(old)

    return lambda names: {respell(name): held for name, held in names.items()}


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
SWITCH = {"use_sliding_window": False}  # a default of families whose layers slide only if this key says so
PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")
SOFTCAP_KEYS = ("final_logit_softcapping", "attn_logit_softcapping")
# Keys for which null is a value; any other key that is null counts as left out.
NULLABLE = frozenset({"sliding_window", "num_key_value_heads", "head_dim", *SOFTCAP_KEYS})


# transformers' own default may be an id that a small vocabulary has not.
NO_PADDING = Rule(frozenset(), lambda hf_config, fields: {}, lambda flat: {"pad_token_id": None})


def inert(reason: str, keys: str) -> dict[str, str]:
    """Keys that change nothing in a family, for one reason."""
    return dict.fromkeys(keys.split(), reason)


def past_max_window_layers(index: int, hf_config: HfConfig) -> bool:
    """Qwen: whether layer `index` is one of the last, if any slide at all."""
    return bool(hf_config.get("use_sliding_window")) and index >= hf_config.get("max_window_layers", 28)


def sliding_pattern(hf_config: HfConfig) -> int:
    """Gemma 3: one layer in this many attends to all positions."""
    return next((hf_config[key] for key in PATTERN_KEYS if hf_config.get(key)), 6)
