"""Experts as the feed-forward part of a layer: a router chooses a few MLPs for each row, and weighs their outputs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig, check_choice, check_counts, check_flags, check_numbers
from detspec.errors import InputError
from detspec.model.mlp import GatedMLP
from detspec.model.rows import RowOps
from detspec.model.weights import Experts, Weights, residual, weight, zeros
from detspec.ops import collectives
from detspec.ops.gate import ACTIVATION_FNS
from detspec.ops.linear.api import biased
from detspec.ops.rounding import rounded
from detspec.ops.row_sum import elementwise_max

SCORES = ("softmax", "sigmoid", "chosen")
MAX_EXPERTS = 1024  # models that we know have up to 512; folders name each, in each layer


@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """`sum of w_e * down_e(activation(gate_e(x)) * up_e(x))` over the `active` experts that the router prefers for a row.

    All sums have one order: the router's is that of the row's other sums, experts are added from the most preferred to the
    least. Of equally preferred experts the first are taken.

    Attributes:
        num: `E` experts.
        active: `k`, how many of them a row takes.
        d_ff: `F`, the inner width of one.
        activation: see `GatedMLP`.
        score: how logits of the router become weights: "softmax" over all experts, "sigmoid" of each, or "chosen", a softmax
            over the chosen ones.
        renormalised: weights of the chosen ones are divided by their sum.
        scale: weights are multiplied by it.
        correction: the router has a bias for each expert, float32, which is added where it chooses, not where it weighs.
        groups: experts are chosen from the best of so many groups of neighbours, those with the largest sums of two scores.
        active_groups: how many groups a row may choose from.
        shared_d_ff: inner width of an MLP that every row takes besides; 0 for none.
        shared_gate: the output of that is multiplied by a sigmoid of the row (Qwen1.5-MoE).
        float32_router: the router's matrix is float32 whatever the dtype of the model, and so are the rows that it reads.
        bias: the router and all projections of experts add a bias (gpt-oss).
        clamp: largest size of what gates and ups give; the gate is then `(up + 1) * gate * sigmoid(1.702 gate)` (gpt-oss).
    """

    num: int
    active: int
    d_ff: int
    activation: str = "silu"
    score: str = "softmax"
    renormalised: bool = False
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    active_groups: int = 1
    shared_d_ff: int = 0
    shared_gate: bool = False
    float32_router: bool = False
    bias: bool = False
    clamp: float | None = None

    def __post_init__(self) -> None:
        check_counts(self, "num", "active", "d_ff", "groups", "active_groups")
        if self.shared_d_ff != 0:
            check_counts(self, "shared_d_ff")
        if self.num > MAX_EXPERTS:
            raise InputError(f"MixtureOfExperts.num must be at most {MAX_EXPERTS}, got {self.num}")
        check_choice(self, "activation", tuple(ACTIVATION_FNS))
        check_choice(self, "score", SCORES)
        check_flags(self, "renormalised", "correction", "shared_gate", "float32_router", "bias")
        check_numbers(self, "scale")
        check_numbers(self, "clamp", optional=True)
        if self.active_groups > self.groups or self.num % self.groups or (self.groups > 1 and self.num < 2 * self.groups):
            raise InputError(
                f"MixtureOfExperts.groups ({self.groups}) must cut its num ({self.num}) into equal groups of two or more, and "
                f"be at least its active_groups ({self.active_groups})"
            )
        if self.active > self.num // self.groups * self.active_groups:
            raise InputError(
                f"MixtureOfExperts.active ({self.active}) exceeds the {self.num // self.groups * self.active_groups} experts "
                "that a row may choose from"
            )

    @property
    def shared(self) -> GatedMLP | None:
        """The MLP that every row takes, if there is one."""
        return GatedMLP(self.shared_d_ff, self.activation) if self.shared_d_ff else None

    def weights(self, cfg: ModelConfig) -> Weights:
        """The router, three stacks of matrices `[E, out, in]`, and what rows share. Routers are neither rounded nor cut."""
        sizes = {"F": self.d_ff, "D": cfg.d_model}
        taken = Experts(self.num, self.active)
        declared = {
            "router": weight("E D", sizes, experts=Experts(self.num, self.num), is_exact=self.float32_router),
            "experts_gate": weight("E F D", sizes, experts=taken),
            "experts_up": weight("E F D", sizes, experts=taken),
            "experts_down": weight("E D F", sizes, residual, taken),
        }
        if self.correction:
            declared["router_bias"] = weight("B", {"B": self.num}, zeros, is_exact=True)
        if self.bias:
            axes = {"gate": "E F", "up": "E F", "down": "E D"}
            declared |= {f"experts_{name}_bias": weight(axis, sizes, zeros, taken) for name, axis in axes.items()}
            declared["router_logit_bias"] = weight("B", {"B": self.num}, zeros, is_exact=True)
        if self.shared is not None:
            declared |= {f"shared_{name}": leaf for name, leaf in self.shared.weights(cfg).items()}
        if self.shared_gate:
            declared["shared_weight"] = weight("E D", sizes, experts=Experts(1, 1))
        return declared

    def rows(self, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        """The chosen experts of rows `x [..., D]`, and what all rows share."""
        rows = x.reshape(-1, x.shape[-1])
        ids, weights_f32 = self.route(params, rows, ops)
        inner = collectives.gather(self._gated(params, rows, ids, ops))
        (each_f32,) = ops.experts_f32(inner, ids, params["experts_down"])
        each_f32 = rounded(_with_bias(each_f32, params, "down", ids, ops) * weights_f32[..., None], jnp.float32)
        out_f32 = in_order(each_f32)
        out = collectives.gather(out_f32.astype(x.dtype)).reshape(x.shape)
        return out if self.shared is None else out + self._shared_rows(self.shared, params, x, ops)

    def route(self, params: dict[str, Any], rows: jax.Array, ops: RowOps) -> tuple[jax.Array, jax.Array]:
        """Chooses experts of `rows [R, D]`, preferred ones first: their numbers, int32, and weights, float32, both `[R, k]`."""
        read = rows.astype(jnp.float32) if self.float32_router else rows
        logits_f32 = biased(ops.linear_f32(read, router=params["router"]), params.get("router_logit_bias"), jnp.float32)
        scores_f32 = logits_f32
        if self.score != "chosen":
            scores_f32 = softmax(logits_f32, ops) if self.score == "softmax" else jax.nn.sigmoid(logits_f32)
        preferred_f32 = scores_f32
        if self.correction:
            preferred_f32 = scores_f32 + params["router_bias"][None, :]
        _, ids = jax.lax.top_k(self._of_best_groups(preferred_f32), self.active)
        chosen_f32 = jnp.take_along_axis(scores_f32, ids, axis=-1)
        if self.score == "chosen":
            chosen_f32 = softmax(chosen_f32, ops)
        if self.renormalised:
            chosen_f32 = chosen_f32 / in_order(chosen_f32)[:, None]
        return ids, chosen_f32 if self.scale == 1 else chosen_f32 * np.float32(self.scale)

    def _gated(self, params: dict[str, Any], rows: jax.Array, ids: jax.Array, ops: RowOps) -> jax.Array:
        """Returns what goes through the gates of the experts `ids [R, k]` of `rows [R, D]`: `[R, k, F]`."""
        gate = params["experts_gate"]
        up = params["experts_up"]
        if not self.bias and self.clamp is None:
            return ops.gated_experts(rows, ids, self.activation, gate, up)
        gate_f32, up_f32 = ops.experts_f32(rows, ids, gate, up)
        gate_f32 = _with_bias(gate_f32, params, "gate", ids, ops)
        up_f32 = _with_bias(up_f32, params, "up", ids, ops)
        if self.clamp is None:
            return ops.gate(gate_f32, up_f32, activation=self.activation, dtype=rows.dtype)
        gate_f32 = jnp.minimum(gate_f32, np.float32(self.clamp))
        up_f32 = jnp.clip(up_f32, np.float32(-self.clamp), np.float32(self.clamp))
        return ((up_f32 + 1) * (gate_f32 * jax.nn.sigmoid(gate_f32 * np.float32(1.702)))).astype(rows.dtype)

    def _of_best_groups(self, preferred_f32: jax.Array) -> jax.Array:
        """`preferred_f32 [R, E]` with minus infinity outside of the groups that a row may choose from."""
        if self.groups == 1:
            return preferred_f32
        grouped_f32 = preferred_f32.reshape(-1, self.groups, self.num // self.groups)
        best_two_f32, _ = jax.lax.top_k(grouped_f32, 2)
        _, best = jax.lax.top_k(best_two_f32[..., 0] + best_two_f32[..., 1], self.active_groups)
        is_best = (best[:, :, None] == jnp.arange(self.groups, dtype=jnp.int32)[None, None, :]).any(1)
        return jnp.where(is_best[:, :, None], grouped_f32, -jnp.inf).reshape(preferred_f32.shape)

    def _shared_rows(self, shared: GatedMLP, params: dict[str, Any], x: jax.Array, ops: RowOps) -> jax.Array:
        own = {name: params[f"shared_{name}"] for name in ("gate", "up", "down")}
        out = shared.rows(own, x, ops)
        if not self.shared_gate:
            return out
        share_f32 = jax.nn.sigmoid(ops.linear_f32(x, shared_weight=params["shared_weight"]))
        return rounded(out.astype(jnp.float32) * share_f32, x.dtype).astype(x.dtype)


def _with_bias(y_f32: jax.Array, params: dict[str, Any], name: str, ids: jax.Array, ops: RowOps) -> jax.Array:
    """`y_f32 [R, k, out]` with the biases of the experts `ids [R, k]`, where there are some."""
    biases = params.get(f"experts_{name}_bias")
    return y_f32 if biases is None else y_f32 + collectives.own(ops.take(biases, ids)).astype(jnp.float32)


def softmax(x: jax.Array, ops: RowOps) -> jax.Array:
    """Softmax of `x [R, n]`, float32, over its last axis, summed in the order of the row's other sums.

    Left as a reduction, XLA gives a maximum of 4,096 numbers or more, and the exponentials after it, to a library for CPUs. Its
    exponentials have other bits than XLA's own.
    """
    powers = jnp.exp(x - elementwise_max(x)[:, None])
    return powers / ops.sum_row(powers)[:, None]


def in_order(x: jax.Array) -> jax.Array:
    """Sums `x [R, k, ...]` over its second axis, from the first to the last."""
    total = x[:, 0]
    for rank in range(1, x.shape[1]):
        total = total + x[:, rank]
    return total
