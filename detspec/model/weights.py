"""The weights of a model, each declared once: the letters of its axes and its first values.

A declaration is a pytree like the parameters. Shapes, random weights, counts and checks follow from it, see
`detspec.model.params`, and so do the tensors of a checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig
from detspec.errors import InputError

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
    """An array of the parameters; `weight` makes it.

    Attributes:
        axes: a name for each axis, in letters: "NH" is `N * H` long. Matrices are `[out, in]`.
        lengths: for each axis the lengths of its letters: `(N, H)`.
        init: makes the first values.
        experts: how long the first axis is, and how much of it one token takes; None without experts.
        looked_up: a table of rows for tokens; others with two axes are matrices to multiply with.
        is_exact: float32 whatever the dtype of the model.
        is_scale: what a norm multiplies by.
    """

    axes: tuple[str, ...]
    lengths: tuple[tuple[int, ...], ...]
    init: InitFn = normal
    experts: Experts | None = None
    looked_up: bool = False
    is_exact: bool = False
    is_scale: bool = False

    def dtype(self, cfg: ModelConfig) -> jnp.dtype:
        """The dtype in a model of `cfg` whose matrices are not rounded."""
        return jnp.dtype(jnp.float32) if self.is_exact else cfg.jax_dtype

    @property
    def is_matrix(self) -> bool:
        """Whether rows are multiplied with it, so that it may be rounded to int8."""
        return len(self.axes) - self.output_axis == 2 and not self.looked_up

    @property
    def output_axis(self) -> int:
        """The axis of its outputs: the first after that of experts."""
        return 0 if self.experts is None else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(map(math.prod, self.lengths))

    def active_size(self, rows: int) -> int:
        """How many of the numbers a pass over `rows` tokens reads at most: those of `rows * active` experts."""
        size = math.prod(self.shape)
        return size if self.experts is None else size * min(self.experts.num, rows * self.experts.active) // self.experts.num


def weight(axes: str, sizes: Mapping[str, int], init: InitFn = normal, experts: Experts | None = None, **kept: bool) -> Weight:
    """A weight whose axes are named in one string: `weight("D NH", sizes, residual)` is `[D, N*H]`.

    Args:
        axes: letters of each axis; the first one is "E" where the weight holds experts.
        sizes: how long each letter is.
        init: makes the first values.
        experts: gives the length of "E".
        kept: `looked_up`, `is_exact` and `is_scale`, see `Weight`.

    Raises `InputError` if a letter has no size, or "E" and `experts` are not given together.
    """
    named = tuple(axes.split())
    sizes = {**sizes, **({} if experts is None else {"E": experts.num})}
    unknown = [letter for axis in named for letter in axis if letter not in sizes]
    if unknown or (experts is not None and named[:1] != ("E",)):
        raise InputError(
            f"the axes of a weight are named in letters that have a size ({' '.join(sizes)}), after an E where it holds "
            f"experts, got {axes!r} and experts={experts}"
        )
    return Weight(named, tuple(tuple(sizes[letter] for letter in axis) for axis in named), init, experts, **kept)


def norm_weight(cfg: ModelConfig, axes: str = "D", **sizes: int) -> Weight:
    """The scale of a norm that leaves what it norms as long as it is: 1, or 0 where models multiply by `1 + w`."""
    return weight(axes, {"D": cfg.d_model, **sizes}, zeros if cfg.norm_plus_one else ones, is_scale=True)


def norm_weights(cfg: ModelConfig, *names: str) -> Weights:
    """The scales of norms of the stream by their names, and their biases, where they have some, as `{name}_bias`."""
    biases = {f"{name}_bias": weight("D", {"D": cfg.d_model}, zeros) for name in names if cfg.norm_bias}
    return {**{name: norm_weight(cfg) for name in names}, **biases}


def weights(cfg: ModelConfig) -> Weights:
    """All weights of `cfg`: each layer declares its own.

    The head is the embedding if it is tied, or a copy of it if matrices are rounded. A model that thinks has one more layer
    like the last one, with a head of its own (the thinker), and one more like the first one (the compressor).
    """
    sizes = {"V": cfg.vocab_size, "D": cfg.d_model}
    of_kinds = [kind.weights(cfg) for kind in cfg.kinds]
    tree = {
        "embed": weight("V D", sizes, normal if cfg.tie_embeddings else unit, looked_up=True),
        "layers": tuple(dict(of_kinds[kind]) for kind in cfg.pattern),
        **norm_weights(cfg, "final_norm"),
    }
    if cfg.learned_positions:
        tree["positions"] = weight("P D", {"P": cfg.max_position, **sizes}, normal, looked_up=True)
    if not cfg.tie_embeddings or cfg.weights is not None:
        tree["head"] = weight("V D", sizes)
    if cfg.thinking is not None:
        thinker = {"layer": dict(of_kinds[cfg.pattern[-1]]), **norm_weights(cfg, "final_norm"), "head": weight("V D", sizes)}
        tree["thinking"] = {"thinker": thinker, "compressor": {"layer": dict(of_kinds[cfg.pattern[0]])}}
    return tree
