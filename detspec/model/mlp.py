"""MLPs as the feed-forward part of a layer: gated, and plain."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig, check_choice, check_counts, check_flags
from detspec.model.rows import RowOps
from detspec.model.weights import Weights, residual, weight, zeros
from detspec.ops import collectives
from detspec.ops.linear.api import biased

ACTIVATION_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclasses.dataclass(frozen=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))`.

    Attributes:
        d_ff: `F`, its inner width.
        activation: that of the gate: "silu", "gelu_tanh", "gelu" (exact), "relu" or "relu2" (its square).
        bias: all three projections add a bias.
    """

    d_ff: int
    activation: str = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, cfg: ModelConfig) -> Weights:
        """Three matrices, and their biases where there are some."""
        return _weights(self, cfg, "gate", "up")

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        """The MLP of rows `x [..., D]`."""
        gate_f32, up_f32 = ops.linears_f32(x, gate=params["gate"], up=params["up"])
        gate_f32 = _with_bias(gate_f32, params, "gate")
        up_f32 = _with_bias(up_f32, params, "up")
        return _down(params, (ACTIVATION_FNS[self.activation](gate_f32) * up_f32).astype(x.dtype), ops)


@dataclasses.dataclass(frozen=True)
class MLP:
    """`down(activation(up(x)))`; the fields are those of `GatedMLP`."""

    d_ff: int
    activation: str = "gelu"
    bias: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, cfg: ModelConfig) -> Weights:
        """Two matrices, and their biases where there are some."""
        return _weights(self, cfg, "up")

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        """The MLP of rows `x [..., D]`."""
        up_f32 = _with_bias(ops.linear_f32(x, up=params["up"]), params, "up")
        return _down(params, ACTIVATION_FNS[self.activation](up_f32).astype(x.dtype), ops)


def _check(mlp: GatedMLP | MLP) -> None:
    check_counts(mlp, "d_ff")
    check_choice(mlp, "activation", tuple(ACTIVATION_FNS))
    check_flags(mlp, "bias")


def _weights(mlp: GatedMLP | MLP, cfg: ModelConfig, *inner: str) -> Weights:
    sizes = {"F": mlp.d_ff, "D": cfg.d_model}
    declared = {**{name: weight("F D", sizes) for name in inner}, "down": weight("D F", sizes, residual)}
    axes = {**dict.fromkeys(inner, "F"), "down": "D"} if mlp.bias else {}
    return {**declared, **{f"{name}_bias": weight(axis, sizes, zeros) for name, axis in axes.items()}}


def _with_bias(y_f32: jax.Array, params: dict[str, Any], name: str) -> jax.Array:
    bias = params.get(f"{name}_bias")
    return biased(y_f32, None if bias is None else collectives.own(bias), jnp.float32)


def _down(params: dict[str, Any], inner: jax.Array, ops: RowOps) -> jax.Array:
    inner = collectives.gather(inner)
    return collectives.gather(_with_bias(ops.linear_f32(inner, down=params["down"]), params, "down").astype(inner.dtype))
