"""The MLP as the feed-forward part of a layer, with a gate or without."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from detspec.config import ModelConfig, check_choice, check_counts, check_flags
from detspec.model.rows import RowOps
from detspec.model.weights import Weights, residual, weight, zeros
from detspec.ops import collectives
from detspec.ops.gate import ACTIVATION_FNS
from detspec.ops.linear.api import biased


@dataclasses.dataclass(frozen=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))`; without a gate `down(activation(up(x)))`.

    Attributes:
        d_ff: `F`, its inner width.
        activation: "silu", "gelu_tanh", "gelu" (exact), "relu" or "relu2" (its square).
        bias: all projections add a bias.
        gated: whether it has a gate; GPT-2 and others have none.
    """

    d_ff: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "d_ff")
        check_choice(self, "activation", tuple(ACTIVATION_FNS))
        check_flags(self, "bias", "gated")

    @property
    def inner(self) -> tuple[str, ...]:
        """The names of the projections to the inner width."""
        return ("gate", "up") if self.gated else ("up",)

    def weights(self, cfg: ModelConfig) -> Weights:
        """Matrices, and their biases where there are some."""
        sizes = {"F": self.d_ff, "D": cfg.d_model}
        declared = {**{name: weight("F D", sizes) for name in self.inner}, "down": weight("D F", sizes, residual)}
        axes = {**dict.fromkeys(self.inner, "F"), "down": "D"} if self.bias else {}
        return {**declared, **{f"{name}_bias": weight(axis, sizes, zeros) for name, axis in axes.items()}}

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        """The MLP of rows `x [..., D]`."""

        def with_bias(y_f32: jax.Array, name: str) -> jax.Array:
            return biased(y_f32, collectives.own(params[f"{name}_bias"]), jnp.float32) if self.bias else y_f32

        matrices = {name: params[name] for name in self.inner}
        if self.gated and not self.bias:
            inner = ops.gated(x, self.activation, **matrices)
        else:
            inner_f32 = tuple(map(with_bias, ops.linears_f32(x, **matrices), self.inner))
            how = {"activation": self.activation, "dtype": x.dtype}
            inner = ops.gate(*inner_f32, **how) if self.gated else ACTIVATION_FNS[self.activation](*inner_f32).astype(x.dtype)
        inner = collectives.gather(inner)
        return collectives.gather(with_bias(ops.linear_f32(inner, down=params["down"]), "down").astype(x.dtype))
