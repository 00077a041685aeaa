"""The weights of a model, each declared once: the letters of its axes and its first values.

A declaration is a pytree like the parameters. Shapes, random weights, counts and checks follow from it, see
`detspec.model.params`, and so do the tensors of a checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError

# The dimension key: letter -> field of `ModelConfig`. `E` is the number of experts, which each weight of experts names itself.
LETTERS = {"V": "vocab_size", "D": "d_model", "N": "num_heads", "K": "num_kv_heads", "H": "head_dim", "F": "d_ff"}

Weights = dict[str, Any]  # a pytree of `Weight`, nested like the parameters
InitFn = Callable[[jax.Array, tuple[int, ...], ModelConfig], jax.Array]  # (key, shape, cfg) -> float32 [*shape]


def ones(key: jax.Array, shape: tuple[int, ...], cfg: ModelConfig) -> jax.Array:
    """1 everywhere."""
    return jnp.ones(shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...], cfg: ModelConfig) -> jax.Array:
    """0 everywhere."""
    return jnp.zeros(shape, jnp.float32)


def unit(key: jax.Array, shape: tuple[int, ...], cfg: ModelConfig) -> jax.Array:
    """Normal with deviation 1."""
    return jax.random.normal(key, shape, jnp.float32)


def normal(key: jax.Array, shape: tuple[int, ...], cfg: ModelConfig) -> jax.Array:
    """Normal with deviation `1/sqrt(in)`; `in` is the last axis."""
    return unit(key, shape, cfg) * np.float32(shape[-1] ** -0.5)


def residual(key: jax.Array, shape: tuple[int, ...], cfg: ModelConfig) -> jax.Array:
    """Normal with deviation `1/sqrt(in * 2 L)`, for the two outputs that each layer adds to the stream."""
    return unit(key, shape, cfg) * np.float32(shape[-1] ** -0.5 / (2 * cfg.num_layers) ** 0.5)


class Experts(NamedTuple):
    """How many experts a weight holds, and how many of them one token is multiplied with."""

    num: int  # `E`
    active: int


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of the parameters; `InputError` if an axis has another letter, or "E" and `experts` are not given together."""

    # one name for each axis, in letters of the dimension key: "NH" is `N * H` long. Matrices are `[out, in]`.
    axes: tuple[str, ...]
    init: InitFn = normal  # makes the first values
    experts: Experts | None = None  # how long the first axis "E" is, and how much of it one token takes; None without experts
    looked_up: bool = False  # a table of rows for tokens; others with two axes are matrices to multiply with

    def __post_init__(self) -> None:
        plain = self.axes if self.experts is None else self.axes[1:]
        if not set("".join(plain)) <= set(LETTERS) or (self.experts is not None and self.axes[:1] != ("E",)):
            raise InputError(
                f"the axes of a weight are named in the letters {' '.join(LETTERS)}, after an E where it holds experts, got "
                f"{' '.join(self.axes)!r} and experts={self.experts}"
            )

    @property
    def is_matrix(self) -> bool:
        """Whether rows are multiplied with it, so that it may be rounded to int8."""
        return len(self.axes) - (self.experts is not None) == 2 and not self.looked_up

    def shape(self, cfg: ModelConfig) -> tuple[int, ...]:
        """The length of each axis in a model of this `cfg`."""
        sizes = {letter: getattr(cfg, field) for letter, field in LETTERS.items()}
        sizes["E"] = 1 if self.experts is None else self.experts.num
        return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.axes)

    def active_size(self, cfg: ModelConfig, rows: int) -> int:
        """How many of the numbers a pass over `rows` tokens reads at most: those of `rows * active` experts."""
        size = math.prod(self.shape(cfg))
        return size if self.experts is None else size * min(self.experts.num, rows * self.experts.active) // self.experts.num


def weight(axes: str, init: InitFn = normal, experts: Experts | None = None) -> Weight:
    """A weight whose axes are named in one string: `weight("D NH", init=residual)` is `[D, N*H]`."""
    return Weight(tuple(axes.split()), init, experts)


def layer_weights(cfg: ModelConfig, index: int) -> Weights:
    """The weights of layer `index`; layers of one model may differ."""
    norm = zeros if cfg.norm_plus_one else ones
    layer = {
        "attn_norm": weight("D", init=norm),
        "q": weight("NH D"),
        "k": weight("KH D"),
        "v": weight("KH D"),
        "o": weight("D NH", init=residual),
        "mlp_norm": weight("D", init=norm),
        "gate": weight("F D"),
        "up": weight("F D"),
        "down": weight("D F", init=residual),
    }
    if cfg.qkv_bias:
        layer |= {"q_bias": weight("NH", init=zeros), "k_bias": weight("KH", init=zeros), "v_bias": weight("KH", init=zeros)}
    if cfg.o_bias:
        layer |= {"o_bias": weight("D", init=zeros)}
    if cfg.qk_norm:
        layer |= {"q_norm": weight("H", init=norm), "k_norm": weight("H", init=norm)}
    if cfg.post_norms:
        layer |= {"attn_post_norm": weight("D", init=norm), "mlp_post_norm": weight("D", init=norm)}
    return layer


def weights(cfg: ModelConfig, layer_fn: Callable[[ModelConfig, int], Weights] = layer_weights) -> Weights:
    """All weights of `cfg`; `layer_fn(cfg, index)` declares those of a layer.

    The head is the embedding if it is tied, or a copy of it if matrices are rounded. A model that thinks has one more layer
    like the last one, with a head of its own (the thinker), and one more like the first one (the compressor).
    """
    final_norm = weight("D", init=zeros if cfg.norm_plus_one else ones)
    tree = {
        "embed": Weight(("V", "D"), init=normal if cfg.tie_embeddings else unit, looked_up=True),
        "layers": tuple(layer_fn(cfg, index) for index in range(cfg.num_layers)),
        "final_norm": final_norm,
    }
    if not cfg.tie_embeddings or cfg.weights is not None:
        tree["head"] = weight("V D")
    if cfg.thinking is not None:
        thinker = {"layer": layer_fn(cfg, cfg.num_layers - 1), "final_norm": final_norm, "head": weight("V D")}
        tree["thinking"] = {"thinker": thinker, "compressor": {"layer": layer_fn(cfg, 0)}}
    return tree
