"""Operations on the rows of an integer model, in the place of those in floats."""

from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import jax

from detspec.integer.spec import FRACTION, Activations, IntMatrix, Scale, SoftCap
from detspec.ops import integer
from detspec.ops.integer_functions import IntegerFunctions

CAPS = (2**-4, 2**10)  # the least soft cap of scores or logits, and the largest
SOFT_CAPS = f"soft caps of {{}} below {CAPS[0]} or above {CAPS[1]}"
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


def soft_cap_of(cap: float | None, unit: Decimal | int = 1) -> SoftCap | None:
    """The soft cap at `cap` of numbers in integers that are `unit` times as large; None if there is none."""
    if cap is None:
        return None
    with localcontext() as context:
        context.prec = 40
        limit = Decimal(cap) * unit
        return SoftCap(_whole(limit * 2**FRACTION), *mantissa_of(2 / (limit * Decimal(2).ln())))


def mantissa_of(x: Decimal | float) -> tuple[int, int]:
    """`(m, e)` with `x > 0` about `m * 2**e`, `2**14 <= m <= 2**15`."""
    x = Decimal(x)
    e = 0
    while x >= 2**15:
        x /= 2
        e += 1
    while x < 2**14:
        x *= 2
        e -= 1
    return _whole(x), e


def _whole(x: Decimal) -> int:
    """The nearest integer, rounded half up."""
    return int((x + Decimal("0.5")).to_integral_value(rounding="ROUND_FLOOR"))
