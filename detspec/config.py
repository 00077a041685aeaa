"""Frozen configuration values: the shape of a model, as layers of a few kinds and the order in which they come."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from detspec.choices import ACTIVATION_BITS, WEIGHTS
from detspec.errors import InputError

ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope")
NORMS = ("rms", "layer")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
MAX_COUNT = 2**31 - 1  # positions, ids and sizes are int32
MAX_NUMBER = 1e308  # an int may be larger than any float
MAX_LAYERS = 1000  # the deepest models that we know have about 130; what is made for each layer stays small


def is_count(value: object) -> bool:
    """A positive integer that int32 holds, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def is_number(value: object) -> bool:
    """A finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def check_counts(config: Any, *fields: str) -> None:
    """Raises `InputError` unless these fields of a dataclass are positive integers that int32 holds."""
    for field in fields:
        if not is_count(value := getattr(config, field)):
            raise InputError(f"{_named(config, field)} must be a positive integer, at most 2**31-1, got {value!r}")


def check_numbers(config: Any, *fields: str, optional: bool = False) -> None:
    """Raises `InputError` unless these fields are positive numbers; with `optional` they may be None."""
    for field in fields:
        value = getattr(config, field)
        if not (optional and value is None) and (not is_number(value) or not value > 0):
            raise InputError(f"{_named(config, field)} must be a positive number{' or None' * optional}, got {value!r}")


def check_flags(config: Any, *fields: str) -> None:
    """Raises `InputError` unless these fields are True or False."""
    for field in fields:
        if not isinstance(value := getattr(config, field), bool):
            raise InputError(f"{_named(config, field)} must be True or False, got {value!r}")


def check_choice(config: Any, field: str, accepted: tuple[str, ...], *, optional: bool = False) -> None:
    """Raises `InputError` unless this field is one of `accepted`; with `optional` it may be None."""
    value = getattr(config, field)
    if value not in accepted and not (optional and value is None):
        raise InputError(f"{_named(config, field)} must be one of {accepted}{' or None' * optional}, got {value!r}")


def _named(config: Any, field: str) -> str:
    return f"{type(config).__name__}.{field}"


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for positions beyond the original training length."""

    # "linear": all frequencies by `1/factor`. "llama3": long wavelengths by `1/factor`, short ones not at all, those between by
    # a blend (Llama 3.1). "yarn": a ramp between both, and attention sharpened by `attention_factor` (Peng et al. 2023, arXiv
    # 2309.00071). "longrope": each frequency by a factor of its own, attention sharpened (Phi-3).
    kind: str
    factor: float  # by which the length is extended, at least 1
    original_max_position: int = 0  # length before the extension, in tokens; all but "linear"
    low_freq_factor: float = 1.0  # the blend of "llama3" begins at the wavelength `original_max_position` over this
    high_freq_factor: float = 4.0  # the blend of "llama3" ends at the wavelength `original_max_position` over this
    beta_fast: float = 32.0  # the ramp of "yarn" begins at the frequency that turns this often within `original_max_position`
    beta_slow: float = 1.0  # the ramp of "yarn" ends at the frequency that turns this often within `original_max_position`
    truncate: bool = True  # the ramp of "yarn" begins and ends at whole dimensions
    attention_factor: float = 1.0  # scale of cosines and sines under "yarn" and "longrope"
    short_factors: tuple[float, ...] = ()  # "longrope": what each frequency is divided by, in texts up to the original length
    long_factors: tuple[float, ...] = ()  # "longrope": and in longer ones; () if it is not known
    is_long: bool = False  # "longrope": all texts have the factors of longer ones

    def __post_init__(self) -> None:
        check_choice(self, "kind", ROPE_SCALINGS)
        if not is_number(self.factor) or not self.factor >= 1:
            raise InputError(f"RopeScaling.factor must be a number of at least 1, got {self.factor!r}")
        if self.kind != "linear" and not is_count(self.original_max_position):
            raise InputError(
                f"RopeScaling.original_max_position must be a positive integer, at most 2**31-1, with {self.kind!r}, "
                f"got {self.original_max_position!r}"
            )
        check_numbers(self, "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        check_flags(self, "truncate", "is_long")
        for name, needed in (("short_factors", self.kind == "longrope"), ("long_factors", self.is_long)):
            factors = getattr(self, name)
            numbers = isinstance(factors, tuple) and all(is_number(x) and x > 0 for x in factors)
            if not numbers or bool(factors) < needed or bool(factors) > (self.kind == "longrope"):
                raise InputError(
                    f"RopeScaling.{name} must be a tuple of positive numbers with 'longrope', and empty else, got {factors!r} "
                    f"with {self.kind!r}"
                )
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"RopeScaling.low_freq_factor ({self.low_freq_factor}) must be less than its high_freq_factor "
                f"({self.high_freq_factor})"
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors of "longrope" that this model has."""
        return self.long_factors if self.is_long else self.short_factors


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer."""

    theta: float = 10000.0  # base of the rotary frequencies
    scaling: RopeScaling | None = None  # stretches the frequencies; None leaves them
    is_local: bool = False  # the base is one that a model names for its sliding layers (Gemma 3); it changes no rotation
    size: int | None = None  # how many places of a head are rotated, the first ones; None is all (GPT-NeoX, GLM-4)
    interleaved: bool = False  # a pair is two neighbours, not places that are half of `size` apart (GLM-4, Helium)

    def __post_init__(self) -> None:
        check_numbers(self, "theta")
        check_flags(self, "is_local", "interleaved")
        if self.size is not None and (not is_count(self.size) or self.size % 2):
            raise InputError(f"Rope.size must be a positive even integer or None, got {self.size!r}")
        if self.scaling is not None and not isinstance(self.scaling, RopeScaling):
            raise InputError(f"Rope.scaling must be a RopeScaling or None, got {self.scaling!r}")
        if self.scaling is not None and self.scaling.kind == "yarn" and not self.theta > 1:
            raise InputError(f"Rope.theta must be more than 1 with 'yarn', got {self.theta!r}")


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
    """Shape of one decoder: layers of a few kinds in the order of `pattern`, between an embedding and an output head.

    `detspec.dense_config` makes the config of a decoder whose layers are all attention and a gated MLP.

    Attributes:
        vocab_size: `V`, rows of the embedding.
        d_model: `D`, width of the residual stream.
        kinds: the different layers, each a `detspec.model.layers.Layer`.
        pattern: for each of the `L` layers, which of `kinds` it is.
        norm_eps: epsilon of every norm.
        tie_embeddings: the output head is the embedding matrix.
        max_position: longest sequence the model was made for, in tokens.
        dtype: dtype of weights and activations: "float32", "bfloat16" or "float16". Reductions are float32 always.
        norm_plus_one: every norm multiplies by `1 + w`, in float32 (Gemma).
        scale_embeddings: embeddings are multiplied by `sqrt(D)` (Gemma).
        logit_softcap: logits are squashed into `+-cap` by `cap * tanh(logits / cap)`; None leaves them.
        thinking: how the model thinks while it reads; None if it has no layers for that.
        weights: "int8" for matrices rounded by row, whose products are exact sums of integers; None leaves them in `dtype`.
            Norms, biases and the embedding are in `dtype` either way, and a tied head is a rounded copy of the embedding.
            "integer" for a model of integers alone, whose `kinds` have `IntegerAttention` and `IntegerMLP`; "integer8" for one
            with activations of 8 bits, see `activation_bits`.
        norm: "rms", or "layer" for norms that subtract the mean (LayerNorm: GPT-2, GPT-NeoX, OPT).
        norm_bias: norms of the layers and the last one add a bias.
        embed_scale: embeddings are multiplied by it (Granite); None leaves them.
        logit_divisor: logits are divided by it, before a soft cap (Granite); None leaves them.
        learned_positions: a row for each of the `max_position` positions is added to the embedding (GPT-2, OPT).
    """

    vocab_size: int
    d_model: int
    kinds: tuple[Any, ...]
    pattern: tuple[int, ...]
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position: int = 2048
    dtype: str = "bfloat16"
    norm_plus_one: bool = False
    scale_embeddings: bool = False
    logit_softcap: float | None = None
    thinking: ThinkingConfig | None = None
    weights: str | None = None
    norm: str = "rms"
    norm_bias: bool = False
    embed_scale: float | None = None
    logit_divisor: float | None = None
    learned_positions: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kinds, tuple) or not all(hasattr(kind, "mixer") for kind in self.kinds):
            raise InputError(
                f"ModelConfig.kinds must be a tuple of detspec.model.layers.Layer, got {self.kinds!r}: detspec.dense_config "
                "makes a config of sizes and flat fields"
            )
        if not isinstance(self.pattern, tuple):
            raise InputError(f"ModelConfig.pattern must be a tuple of numbers of kinds, got {self.pattern!r}")
        check_counts(self, "vocab_size", "d_model", "max_position")
        check_numbers(self, "norm_eps")
        check_numbers(self, "logit_softcap", "embed_scale", "logit_divisor", optional=True)
        check_flags(self, "tie_embeddings", "norm_plus_one", "scale_embeddings", "norm_bias", "learned_positions")
        check_choice(self, "norm", NORMS)
        check_choice(self, "dtype", tuple(sorted(DTYPES)))
        check_choice(self, "weights", WEIGHTS, optional=True)
        if not 1 <= len(self.pattern) <= MAX_LAYERS:
            raise InputError(f"ModelConfig.pattern must name 1 to {MAX_LAYERS} layers, got {len(self.pattern)}")
        if unknown := [kind for kind in self.pattern if type(kind) is not int or not 0 <= kind < len(self.kinds)]:
            raise InputError(
                f"ModelConfig.pattern must hold numbers of the {len(self.kinds)} kinds of layers, from 0 on, got {unknown[0]!r}"
            )
        if self.thinking is not None:
            self._check_thinking(self.thinking)

    def _check_thinking(self, thinking: object) -> None:
        if not isinstance(thinking, ThinkingConfig):
            raise InputError(f"thinking must be a ThinkingConfig or None, got {thinking!r}")
        if self.learned_positions:
            raise InputError("a model with learned_positions cannot think: states have no positions of their own to look up")
        if thinking.out_layer > self.num_layers:
            raise InputError(f"ThinkingConfig.out_layer ({thinking.out_layer}) exceeds the model's {self.num_layers} layers")
        if thinking.end_id >= self.vocab_size:
            raise InputError(f"ThinkingConfig.end_id ({thinking.end_id}) lies outside the vocabulary of {self.vocab_size}")

    @property
    def num_layers(self) -> int:
        """`L`, decoder layers."""
        return len(self.pattern)

    def layer(self, index: int) -> Any:
        """Layer `index`, a `detspec.model.layers.Layer`; negative numbers count from the last one."""
        return self.kinds[self.pattern[index]]

    @property
    def layers(self) -> tuple[Any, ...]:
        """All layers in order."""
        return tuple(self.kinds[kind] for kind in self.pattern)

    def with_layers(self, num_layers: int) -> "ModelConfig":
        """Returns the model cut off after `num_layers` layers; if it has fewer, its pattern goes on from the start."""
        pattern = tuple(self.pattern[index % len(self.pattern)] for index in range(num_layers))
        return dataclasses.replace(self, pattern=pattern)

    @property
    def activation_bits(self) -> int | None:
        """The bits of activations of an integer model; None of a model in floats."""
        return ACTIVATION_BITS.get(self.weights or "")

    @property
    def is_integer(self) -> bool:
        """Whether it is a model of integers alone."""
        return self.activation_bits is not None

    @property
    def jax_dtype(self) -> jnp.dtype:
        """`dtype` as JAX takes it."""
        return jnp.dtype(DTYPES[self.dtype])
