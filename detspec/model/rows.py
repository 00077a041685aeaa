"""Operations on single token rows, in the order of additions that a schedule fixes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from detspec.config import ModelConfig
from detspec.model.integer_rows import IntegerOps, fixed_epsilon
from detspec.ops.attention.sequences import AttendSequenceFn, attend_as_pages, attend_sequence
from detspec.ops.experts.api import ExpertsFn, GatedExpertsFn, Matrices, experts_fn, gated_experts_fn
from detspec.ops.gate import GateFn, gated
from detspec.ops.gate import with_derivative as gate_with_derivative
from detspec.ops.gathers import TakeFn, rows_of, take_with_derivative
from detspec.ops.implementations import operations
from detspec.ops.integer_functions import integer_functions
from detspec.ops.linear.api import GatedFn, LinearsFn, Matrix, gate_fn, gated_fn, linears_fn
from detspec.ops.linear.derivative import experts_with_derivative, linears_with_derivative
from detspec.ops.norm import layer_norm, rms_norm
from detspec.ops.row_sum import SumFn, native_sum, sum_fn
from detspec.ops.row_sum import with_derivative as sums_with_derivative
from detspec.riders.rider import AdaptFn, Product
from detspec.schedule import Numerics

NormFn = Callable[..., jax.Array]  # (x [..., D], scale [D]) -> [..., D]; a LayerNorm takes a bias [D], too
NORM_FNS: dict[str, NormFn] = {"rms": rms_norm, "layer": layer_norm}
KEPT = "kept"  # the name of what `kept_ops` give
KEEP = jax.checkpoint_policies.save_only_these_names(KEPT)


def nowhere(*_: Any) -> None:
    """Says that no kernel has a gate and its products."""


class RowOps(NamedTuple):
    """Operations on single token rows, whose order of additions a schedule fixes."""

    norm: NormFn
    products_f32: LinearsFn
    experts_f32: ExpertsFn
    sum_row: SumFn
    gate: GateFn = gated  # of products
    gated_products: GatedFn = nowhere  # the gate and its products in one, where a kernel has both
    gated_experts_products: GatedExpertsFn = nowhere
    attend_fn: AttendSequenceFn = attend_sequence  # of whole sequences
    take: TakeFn = rows_of  # rows [...] of a table
    layer: int = 0  # whose products riders may change
    adapt_fn: AdaptFn | None = None

    def normed(self, x: jax.Array, params: Mapping[str, Any], name: str) -> jax.Array:
        """The norm `name` of `x [..., D]`, with its bias where it has one; `x` itself where there is no such norm."""
        if name not in params:
            return x
        biases = [params[bias] for bias in (f"{name}_bias",) if bias in params]
        return self.norm(x, params[name], *biases)

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The stream `x` plus what a part of a layer adds to it."""
        return x + y

    def linears_f32(self, x: jax.Array, /, **weights: Matrix) -> tuple[jax.Array, ...]:
        """Products of `x [..., n]` with `weights [m, n]` by their names, float32 `[..., m]`; riders may change them."""
        products = self.products_f32(x, *weights.values())
        if self.adapt_fn is None:
            return products
        of_rows = zip(weights, products, strict=True)
        return tuple(self.adapt_fn(Product(self.layer, name, x, y_f32, self.products_f32)) for name, y_f32 in of_rows)

    def gated(self, x: jax.Array, activation: str, /, *, gate: Matrix, up: Matrix) -> jax.Array:
        """`activation` of the product of `x [..., n]` with `gate [m, n]`, times that with `up`: `[..., m]` in its dtype."""
        found = None if self.adapt_fn is not None else self.gated_products(x, gate, up, activation)
        if found is None:
            found = self.gate(*self.linears_f32(x, gate=gate, up=up), activation=activation, dtype=x.dtype)
        return found

    def gated_experts(self, x: jax.Array, ids: jax.Array, activation: str, gate: Matrices, up: Matrices) -> jax.Array:
        """As `gated`, of the experts `ids [..., k]` of rows `x [..., n]`: `[..., k, m]`."""
        found = self.gated_experts_products(x, ids, gate, up, activation)
        if found is None:
            found = self.gate(*self.experts_f32(x, ids, gate, up), activation=activation, dtype=x.dtype)
        return found

    def linear_f32(self, x: jax.Array, /, **weight: Matrix) -> jax.Array:
        """`linears_f32` with one weight."""
        (y_f32,) = self.linears_f32(x, **weight)
        return y_f32


def row_ops(cfg: ModelConfig, sum_row: SumFn, numerics: Numerics, used: jax.Array | None = None) -> RowOps:
    """This model's norm, summed by `sum_row`, and the products of `numerics` for rows that are `used [R]`."""
    norm = partial(NORM_FNS[cfg.norm], eps=cfg.norm_eps, sum_fn=sum_row, plus_one=cfg.norm_plus_one)
    return RowOps(norm, linears_fn(numerics, used), experts_fn(numerics, used), sum_row)


def canonical_ops(cfg: ModelConfig, numerics: Numerics, used: jax.Array | None = None) -> RowOps:
    """Operations on single rows in the order of `numerics`; `used [G, W]` are the rows that matter, see `linears_fn`.

    Those of an integer model have no order to choose.
    """
    if cfg.activation_bits is not None:
        functions = integer_functions(numerics, cfg.activation_bits)
        return IntegerOps(fixed_epsilon(cfg.norm_eps), functions, cfg.activation_bits)  # type: ignore[return-value]
    used = None if used is None else used.reshape(-1)
    return row_ops(cfg, sum_fn(numerics), numerics, used)._replace(
        gate=gate_fn(numerics), gated_products=gated_fn(numerics, used), gated_experts_products=gated_experts_fn(numerics, used)
    )


def exact_ops(cfg: ModelConfig, numerics: Numerics) -> RowOps:
    """Operations on masters, with the bits of `canonical_ops` and with derivatives; of whole sequences, too."""
    ops = row_ops(cfg, sums_with_derivative(sum_fn(numerics)), numerics)
    return ops._replace(
        products_f32=linears_with_derivative(ops.products_f32),
        experts_f32=experts_with_derivative(ops.experts_f32),
        gate=gate_with_derivative(gate_fn(numerics)),
        attend_fn=attend_as_pages(numerics),
        take=take_with_derivative(operations(numerics).take),
    )


def kept_ops(ops: RowOps) -> RowOps:
    """`ops` whose products and attention are kept where the policy of a checkpoint is `KEEP`."""

    def keeping(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: jax.tree.map(partial(checkpoint_name, name=KEPT), fn(*args, **how))

    return ops._replace(
        products_f32=keeping(ops.products_f32), experts_f32=keeping(ops.experts_f32), attend_fn=keeping(ops.attend_fn)
    )


def training_ops(cfg: ModelConfig) -> RowOps:
    """Operations on single rows in XLA's own order of additions."""
    return row_ops(cfg, native_sum, Numerics(linear="xla"))
