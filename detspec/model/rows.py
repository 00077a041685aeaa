"""Operations on single token rows, in the order of additions that a schedule fixes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from detspec.config import ModelConfig
from detspec.ops.linear.api import LinearsFn, linears_fn
from detspec.ops.norm import rms_norm
from detspec.ops.row_sum import SumFn, native_sum, sum_fn
from detspec.schedule import Numerics

NormFn = Callable[[jax.Array, jax.Array], jax.Array]  # (x [..., D], scale [D]) -> [..., D]


class RowOps(NamedTuple):
    """Operations on single token rows, whose order of additions a schedule fixes."""

    norm: NormFn
    linears_f32: LinearsFn

    def linear_f32(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`linears_f32` with one weight."""
        return self.linears_f32(x, weight)[0]


def row_ops(cfg: ModelConfig, sum_row: SumFn, linears_f32: LinearsFn) -> RowOps:
    """This model's RMSNorm, summed by `sum_row`, and `linears_f32`."""
    return RowOps(partial(rms_norm, eps=cfg.norm_eps, sum_fn=sum_row, plus_one=cfg.norm_plus_one), linears_f32)


def canonical_ops(cfg: ModelConfig, numerics: Numerics, used: jax.Array | None = None) -> RowOps:
    """Operations on single rows in the order of `numerics`; `used [G, W]` are the rows that matter, see `linears_fn`."""
    return row_ops(cfg, sum_fn(numerics), linears_fn(numerics, None if used is None else used.reshape(-1)))


def training_ops(cfg: ModelConfig) -> RowOps:
    """Operations on single rows in XLA's own order of additions."""
    return row_ops(cfg, native_sum, linears_fn(Numerics(linear="xla")))
