"""Operations on the rows of an integer model, in the place of those in floats."""

from typing import Any, NamedTuple

import jax

from detspec.integer.spec import FRACTION, Activations, IntMatrix, Scale
from detspec.ops import integer
from detspec.ops.integer_functions import IntegerFunctions

AFTER = ("attn_post_norm", "mlp_post_norm")  # the norms whose results are added to the stream


class IntegerOps(NamedTuple):
    """Operations on rows of an integer model, in the place of `detspec.model.rows.RowOps`."""

    epsilon: int  # of norms, 32 fraction bits
    functions: IntegerFunctions
    activation_bits: int = 15
    layer: int = 0
    adapt_fn: None = None  # riders change no products of integers

    def normed(self, x: jax.Array, params: dict[str, Any], name: str) -> Any:
        """The norm `name` of fixed `x [..., D]`: before a part of a layer the row that it reads, after one fixed again.

        Where there is no such norm, a part reads the row of `x`, and `x` itself goes on after it.
        """
        if name in AFTER:
            return self.after(x, params[name]) if name in params else x
        return self.functions.normed(x, params[name], self.epsilon) if name in params else integer.row_of(x, -FRACTION)

    def after(self, x: jax.Array, scale: Scale) -> jax.Array:
        """The norm of a part's output `x [..., D]` as the stream takes it, fixed."""
        row = self.functions.normed(x, scale, self.epsilon)
        return integer.as_fixed(integer.spread(row) if self.activation_bits == 8 else row)

    def linears_f32(self, row: Activations, /, **weights: IntMatrix) -> tuple[jax.Array, ...]:
        """Products of `row [R, n]` with `weights [m, n]`, fixed `[R, m]`."""
        return tuple(self.functions.products(row, *weights.values()))

    def linear_f32(self, row: Activations, /, **weight: IntMatrix) -> jax.Array:
        """`linears_f32` with one weight."""
        return self.linears_f32(row, **weight)[0]

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The stream `x` plus `y`, both fixed."""
        return integer.added(x, y)


def fixed_epsilon(epsilon: float) -> int:
    """The epsilon of norms with 32 fraction bits, at least 1."""
    return max(1, round(epsilon * 2**32))
