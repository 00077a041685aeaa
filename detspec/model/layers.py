"""A layer as a value: a mixer of positions, then a feed-forward part, each with its norms; and what stands around the layers.

What a mixer and a feed-forward part are is said by `Mixer` and `FeedForward`; `detspec.model.attention` and
`detspec.model.mlp` have the ones of dense decoders. A new kind of layer is another frozen dataclass with these methods.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig, check_flags, check_numbers
from detspec.errors import InputError
from detspec.model.integer_rows import soft_cap_of
from detspec.model.places import Where
from detspec.model.rows import RowOps
from detspec.model.weights import Weights, norm_weights
from detspec.ops import collectives
from detspec.ops.integer import soft_capped
from detspec.ops.rounding import rounded
from detspec.ops.softcap import softcap
from detspec.roofline import PassShape, Work
from detspec.schedule import Numerics
from detspec.state import Injected


class Mixer(Protocol):
    """How the rows of a layer see other positions. Frozen and hashable: programs are cached by it."""

    def weights(self, cfg: ModelConfig) -> Weights:
        """Returns the weights by name, with their letters."""

    def pools(self, numerics: Numerics, num_pages: int, num_seats: int) -> Any:
        """A pytree of `detspec.cache.Pool`: what it keeps of the positions that it has read."""

    def prepare(self, positions: jax.Array) -> Any:
        """Computes the values that all layers of the kind share in a pass over rows at `positions [...]`."""

    def windows(
        self, params: dict[str, Any], x: jax.Array, where: Where, pools: Any, ops: RowOps, out_ops: RowOps
    ) -> tuple[jax.Array, Any]:
        """Mixes normed rows `x [R, D]` of windows; returns `[R, D]` and the pools, with what these rows leave there.

        Windows of one sequence are in ascending order, and each sees those before it. `out_ops` works out what is only for the
        result, `ops` what goes into the pools too.
        """

    def whole(self, params: dict[str, Any], x: jax.Array, prepared: Any, ops: RowOps) -> jax.Array:
        """Mixes whole sequences `x [B, T, D]` from position 0, differentiable."""

    def work(self, shape: PassShape) -> Work:
        """The bytes that a pass reads from the pools, and its operations but for products with weights."""


class FeedForward(Protocol):
    """The part of a layer that transforms each row by itself. Frozen and hashable."""

    def weights(self, cfg: ModelConfig) -> Weights:
        """Returns the weights by name, with their letters."""

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        """Transforms normed rows `x [..., D]`."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A kind of decoder layer.

    Attributes:
        mixer: how rows see other positions.
        ff: transforms each row by itself.
        post_norms: outputs of both go through a norm of their own before they are added (Gemma 2 and 3).
        pre_norms: inputs of both go through a norm of their own; OLMo 2 and EXAONE 4 have post norms alone.
        parallel: both read the stream that comes into the layer, and are added to it together (GPT-NeoX).
        residual_scale: their outputs are multiplied by it before they are added (Granite); None leaves them.
    """

    mixer: Mixer
    ff: FeedForward
    post_norms: bool = False
    pre_norms: bool = True
    parallel: bool = False
    residual_scale: float | None = None

    def __post_init__(self) -> None:
        check_flags(self, "post_norms", "pre_norms", "parallel")
        check_numbers(self, "residual_scale", optional=True)

    def weights(self, cfg: ModelConfig) -> Weights:
        """The weights of both parts, and the norms before them and after; `InputError` if two have one name."""
        before = ("attn_norm", "mlp_norm") if self.pre_norms else ()
        after = ("attn_post_norm", "mlp_post_norm") if self.post_norms else ()
        declared: Weights = {}
        for part in (self.mixer.weights(cfg), self.ff.weights(cfg), norm_weights(cfg, *before, *after)):
            if taken := sorted(declared.keys() & part.keys()):
                raise InputError(f"two weights of a layer are called {taken[0]!r}: give that of your own kind another name")
            declared |= part
        return declared


# (normed x [..., D]) -> (mixed [..., D], what the caller threads on)
MixFn = Callable[[jax.Array], tuple[jax.Array, Any]]


def run_layer(
    layer: Layer, params: dict[str, Any], x: jax.Array, mix_fn: MixFn, ops: RowOps, out_ops: RowOps
) -> tuple[jax.Array, Any]:
    """Runs a layer over `x [..., D]`, with the norms before and after its two halves that it has.

    `out_ops` works out what is only for the result.
    """

    with jax.named_scope("attention"):
        mixed, carry = mix_fn(ops.normed(x, params, "attn_norm"))
        read = x
        x = ops.added(x, scaled(ops.normed(mixed, params, "attn_post_norm"), layer.residual_scale))
    with jax.named_scope("mlp"):
        transformed = layer.ff.rows(params, ops.normed(read if layer.parallel else x, params, "mlp_norm"), out_ops)
        x = ops.added(x, scaled(ops.normed(transformed, params, "mlp_post_norm"), layer.residual_scale))
    return x, carry


def scaled(x: jax.Array, factor: float | None) -> jax.Array:
    """`x` times `factor`, rounded to its dtype before anything is added; `x` itself for None."""
    return x if factor is None else rounded(x.astype(jnp.float32) * np.float32(factor), x.dtype).astype(x.dtype)


def through_layers(
    params: dict[str, Any],
    cfg: ModelConfig,
    x: jax.Array,
    layer_fn: Callable[[int, dict[str, Any], jax.Array], tuple[jax.Array, Any]],
    injected: Injected | None = None,
) -> tuple[Sequence[jax.Array], tuple[Any, ...]]:
    """Takes `x [..., D]` through all layers; `layer_fn(index, params, x)` runs one, and returns what it threads on, too.

    Returns the streams after 0, 1, .. `L` layers, what was injected included, and what each layer threads on.
    """
    streams = []
    carries = []
    for index, layer in enumerate(params["layers"]):
        x = x if injected is None else injected.at(index, x)
        streams.append(x)
        with jax.named_scope(f"layer_{index}"):
            x, carry = layer_fn(index, layer, x)
        carries.append(carry)
    return [*streams, x], tuple(carries)


def scale_embeddings(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Embedding rows `x [..., D]` as the first layer takes them."""
    x = scaled(x, cfg.embed_scale)
    return x * jnp.asarray(cfg.d_model**0.5, x.dtype) if cfg.scale_embeddings else x


def logits_f32(params: dict[str, Any], cfg: ModelConfig, x: jax.Array, ops: RowOps) -> jax.Array:
    """Final norm and output head: `x [..., D]` -> float32 `[..., V]`; see `head_f32`."""
    with jax.named_scope("logits"):
        return head_f32(params, cfg, ops.normed(x, params, "final_norm"), ops)


def head_f32(params: dict[str, Any], cfg: ModelConfig, normed: jax.Array, ops: RowOps) -> jax.Array:
    """Output head: `normed [..., D]` -> float32 `[..., V]`; on chips for their share of the rows, see `to_rows`."""
    found_f32 = collectives.to_rows(ops.linear_f32(normed, head=params["head"] if "head" in params else params["embed"]))
    return capped(cfg, found_f32)


def capped(cfg: ModelConfig, logits: jax.Array) -> jax.Array:
    """`logits`, float32 or fixed, divided and squashed as the model does it with products of its head."""
    if cfg.is_integer:
        cap = soft_cap_of(cfg.logit_softcap)
        return logits if cap is None else soft_capped(logits, cap)
    if cfg.logit_divisor is not None:
        logits = rounded(logits / np.float32(cfg.logit_divisor), jnp.float32)
    return softcap(logits, cfg.logit_softcap)
