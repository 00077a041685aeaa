"""Frozen configuration values: the shape of a model."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from detspec.choices import WEIGHTS
from detspec.errors import InputError

ROPE_SCALINGS = ("linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu_tanh")
POSITION_ENCODINGS = ("rope", "alibi")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
MAX_COUNT = 2**31 - 1  # of anything: positions, ids and sizes are int32
MAX_NUMBER = 1e308  # an int may be larger than any float
MAX_LAYERS = 1000  # the deepest models that we know have about 130; what is made for each layer stays small


def is_count(value: object) -> bool:
    """A positive integer that int32 holds, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def is_number(value: object) -> bool:
    """A finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for positions beyond the original training length."""

    # "linear": all frequencies by `1/factor`. "llama3": long wavelengths by `1/factor`, short ones not at all, those between by
    # a blend (Llama 3.1). "yarn": a ramp between both, and attention sharpened by `attention_factor` (Peng et al. 2023, arXiv
    # 2309.00071).
    kind: str
    factor: float  # by which the length is extended, at least 1
    original_max_position: int = 0  # length before the extension, in tokens; "llama3" and "yarn"
    low_freq_factor: float = 1.0  # the blend of "llama3" begins at the wavelength `original_max_position` over this
    high_freq_factor: float = 4.0  # the blend of "llama3" ends at the wavelength `original_max_position` over this
    beta_fast: float = 32.0  # the ramp of "yarn" begins at the frequency that turns this often within `original_max_position`
    beta_slow: float = 1.0  # the ramp of "yarn" ends at the frequency that turns this often within `original_max_position`
    truncate: bool = True  # the ramp of "yarn" begins and ends at whole dimensions
    attention_factor: float = 1.0  # scale of cosines and sines under "yarn"

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise InputError(f"RopeScaling.kind must be one of {ROPE_SCALINGS}, got {self.kind!r}")
        if not is_number(self.factor) or not self.factor >= 1:
            raise InputError(f"RopeScaling.factor must be a number of at least 1, got {self.factor!r}")
        if self.kind != "linear" and not is_count(self.original_max_position):
            raise InputError(
                f"RopeScaling.original_max_position must be a positive integer, at most 2**31-1, with {self.kind!r}, "
                f"got {self.original_max_position!r}"
            )
        for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            if not is_number(getattr(self, field)) or not getattr(self, field) > 0:
                raise InputError(f"RopeScaling.{field} must be a positive number, got {getattr(self, field)!r}")
        if not isinstance(self.truncate, bool):
            raise InputError(f"RopeScaling.truncate must be True or False, got {self.truncate!r}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"RopeScaling.low_freq_factor ({self.low_freq_factor}) must be less than its high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class ThinkingConfig:
    """Reasoning in states that are made chunk by chunk while the input is read (Thinking States, arXiv 2602.08332, section 3).

    Attributes:
        chunk: `C`, tokens of the input that are read between two thoughts; a power of two.
        in_layer: how many layers the stream has been through when a chunk's states are added to it.
        out_layer: how many it has been through when the thought after a chunk is read off it.
        max_thought: `M`, most tokens of a thought, the one that ends it included.
        end_id: the token that ends a thought.
    """

    chunk: int
    in_layer: int
    out_layer: int
    max_thought: int
    end_id: int

    def __post_init__(self) -> None:
        if not is_count(self.chunk) or self.chunk & (self.chunk - 1):
            raise InputError(f"ThinkingConfig.chunk must be a power of two, got {self.chunk!r}")
        for field, least in (("in_layer", 0), ("out_layer", 1), ("max_thought", 1), ("end_id", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
                raise InputError(f"ThinkingConfig.{field} must be an integer of at least {least}, got {value!r}")
        if not self.in_layer < self.out_layer:
            raise InputError(
                f"ThinkingConfig.in_layer ({self.in_layer}) must be less than its out_layer ({self.out_layer}): states go in "
                "below the layer that thoughts are read off"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder; the families (Llama, Mistral, Qwen, Gemma) are values of it.

    Attributes:
        vocab_size: `V`, rows of the embedding.
        d_model: `D`, width of the residual stream.
        num_layers: `L` decoder blocks.
        num_heads: `N` query heads.
        num_kv_heads: `K` key/value heads; divides `num_heads`.
        head_dim: `H`; need not be `D / N`, must be even (rotary pairs).
        d_ff: `F`, width of the gated MLP.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of every RMSNorm.
        tie_embeddings: the output head is the embedding matrix.
        max_position: longest sequence the model was made for, in tokens.
        dtype: dtype of weights and activations: "float32", "bfloat16" or "float16". Reductions are float32 always.
        rope_scaling: stretches the rotary frequencies; None leaves them.
        sliding_window: positions that sliding layers attend to, their own included; None without such layers.
        sliding_layers: for each layer, whether it slides; `()` if none does.
        sliding_rope_theta: unscaled rotary base of the sliding layers, where it is another (Gemma 3).
        qkv_bias: projections to queries, keys and values add a bias.
        o_bias: the attention's output projection adds a bias.
        qk_norm: queries and keys go through an RMSNorm of each head before they are rotated.
        post_norms: attention and MLP outputs go through an RMSNorm of their own before they are added (Gemma 2 and 3).
        norm_plus_one: every RMSNorm multiplies by `1 + w`, in float32 (Gemma).
        scale_embeddings: embeddings are multiplied by `sqrt(D)` (Gemma).
        activation: activation of the MLP's gate: "silu" or "gelu_tanh".
        score_dim: attention scores are divided by its square root; None is `H`.
        attn_softcap: scores are squashed into `+-cap` by `cap * tanh(scores / cap)`; None leaves them.
        logit_softcap: the same for the logits.
        position_encoding: "rope" rotates queries and keys; "alibi" lowers a head's scores in proportion to the distance (Press
            et al. 2022, arXiv 2108.12409), and the rotary fields say nothing.
        thinking: how the model thinks while it reads; None if it has no layers for that.
        weights: "int8" for matrices rounded by row, whose products are exact sums of integers; None leaves them in `dtype`.
            Norms, biases and the embedding are in `dtype` either way, and a tied head is a rounded copy of the embedding.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position: int = 2048
    dtype: str = "bfloat16"
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope_theta: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_plus_one: bool = False
    scale_embeddings: bool = False
    activation: str = "silu"
    score_dim: float | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    position_encoding: str = "rope"
    thinking: ThinkingConfig | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_position"):
            if not is_count(getattr(self, field)):
                raise InputError(
                    f"ModelConfig.{field} must be a positive integer, at most 2**31-1, got {getattr(self, field)!r}"
                )
        if self.num_layers > MAX_LAYERS:
            raise InputError(f"ModelConfig.num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        for field in ("rope_theta", "norm_eps", "sliding_rope_theta", "score_dim", "attn_softcap", "logit_softcap"):
            value = getattr(self, field)
            optional = field not in ("rope_theta", "norm_eps")
            if not (value is None and optional) and (not is_number(value) or not value > 0):
                raise InputError(f"ModelConfig.{field} must be a positive number{' or None' * optional}, got {value!r}")
        for field in ("tie_embeddings", "qkv_bias", "o_bias", "qk_norm", "post_norms", "norm_plus_one", "scale_embeddings"):
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"ModelConfig.{field} must be True or False, got {getattr(self, field)!r}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even (rotary pairs), got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")
        if self.weights not in (None, *WEIGHTS):
            raise InputError(f"weights must be one of {WEIGHTS} or None, got {self.weights!r}")
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        if self.position_encoding not in POSITION_ENCODINGS:
            raise InputError(f"position_encoding must be one of {POSITION_ENCODINGS}, got {self.position_encoding!r}")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise InputError(f"rope_scaling must be a RopeScaling or None, got {self.rope_scaling!r}")
        if not all(isinstance(slides, bool) for slides in self.sliding_layers):
            raise InputError(f"sliding_layers must be True or False for each layer, got {self.sliding_layers!r}")
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise InputError(f"sliding_layers must name each of the {self.num_layers} layers, got {len(self.sliding_layers)}")
        if (any(self.sliding_layers) or self.sliding_window is not None) and not is_count(self.sliding_window):
            raise InputError(f"sliding layers need a sliding_window of at least 1, got {self.sliding_window!r}")
        if self.thinking is not None:
            self._check_thinking(self.thinking)

    def _check_thinking(self, thinking: object) -> None:
        if not isinstance(thinking, ThinkingConfig):
            raise InputError(f"thinking must be a ThinkingConfig or None, got {thinking!r}")
        if thinking.out_layer > self.num_layers:
            raise InputError(f"ThinkingConfig.out_layer ({thinking.out_layer}) exceeds the model's {self.num_layers} layers")
        if thinking.end_id >= self.vocab_size:
            raise InputError(f"ThinkingConfig.end_id ({thinking.end_id}) lies outside the vocabulary of {self.vocab_size}")

    def sliding_window_of(self, layer: int) -> int | None:
        """Positions that `layer` attends to; None is all."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON has them: lists for tuples, an object for `rope_scaling`; without `weights` where that is None.

        So the digests of models that are not rounded stay what they were before there was a choice.
        """
        values = {**dataclasses.asdict(self), "sliding_layers": list(self.sliding_layers)}
        return {name: value for name, value in values.items() if name != "weights" or value is not None}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "ModelConfig":
        """The config that `to_json` made `values` of; `TypeError` for a field that there is not."""
        scaling = values.get("rope_scaling")
        thinking = values.get("thinking")
        rebuilt = {
            "rope_scaling": None if scaling is None else RopeScaling(**scaling),
            "thinking": None if thinking is None else ThinkingConfig(**thinking),
            "sliding_layers": tuple(values.get("sliding_layers", ())),
        }
        return ModelConfig(**{**values, **rebuilt})

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return (self.head_dim if self.score_dim is None else self.score_dim) ** -0.5

    @property
    def jax_dtype(self) -> jnp.dtype:
        """`dtype` as JAX takes it."""
        return jnp.dtype(DTYPES[self.dtype])
