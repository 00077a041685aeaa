"""The gated MLP as the feed-forward part of a layer."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from detspec.config import ModelConfig, check_choice, check_counts
from detspec.model.rows import RowOps
from detspec.model.weights import Weights, residual, weight
from detspec.ops import collectives

ACTIVATION_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))`.

    Attributes:
        d_ff: `F`, its inner width.
        activation: that of the gate: "silu" or "gelu_tanh".
    """

    d_ff: int
    activation: str = "silu"

    def __post_init__(self) -> None:
        check_counts(self, "d_ff")
        check_choice(self, "activation", tuple(ACTIVATION_FNS))

    def weights(self, cfg: ModelConfig) -> Weights:
        """Three matrices."""
        sizes = {"F": self.d_ff, "D": cfg.d_model}
        return {"gate": weight("F D", sizes), "up": weight("F D", sizes), "down": weight("D F", sizes, residual)}

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        """The MLP of rows `x [..., D]`."""
        gate_f32, up_f32 = ops.linears_f32(x, gate=params["gate"], up=params["up"])
        gated = collectives.gather((ACTIVATION_FNS[self.activation](gate_f32) * up_f32).astype(x.dtype))
        return collectives.gather(ops.linear_f32(gated, down=params["down"]).astype(x.dtype))
