"""The contract of products with the weights of experts, and the choice of an implementation by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from detspec.errors import InputError
from detspec.ops.experts import xla
from detspec.ops.gate import IN_C
from detspec.ops.implementations import operations
from detspec.ops.linear.api import rounded_or_floats
from detspec.ops.linear.int8 import QTensor, check_inputs
from detspec.schedule import Numerics

# Their kernels run with linear "xla", too: ordinary decoding on TPUs has XLA's products, which would read every expert.
KERNELS_FOR_XLA = ("pallas_tpu",)
Matrices = jax.Array | QTensor  # weights [E, out, in], a matrix for each expert
# (x [..., in] or [..., k, in], ids [..., k], weights [E, out, in], ...) -> float32 [..., k, out], ...
ExpertsFn = Callable[..., tuple[jax.Array, ...]]
# (x [..., in], ids [..., k], gate [E, F, in], up [E, F, in], activation) -> [..., k, F] in the dtype of x, or None
GatedExpertsFn = Callable[..., jax.Array | None]


def experts_fn(numerics: Numerics, used: jax.Array | None = None) -> ExpertsFn:
    """Products of each row with the matrices of the experts that it chose, by the implementation that `numerics` names.

    The function takes `ids [..., k]`, int32, the experts of each row, and weights `[E, out, in]` of the dtype of `x`, all for
    these ids. `x` is `[..., in]` if all choices of a row multiply that row, and `[..., k, in]` if each has a row of its own. It
    returns `x @ weight[id].T` of each weight, accumulated in float32, as float32 `[..., k, out]`. An id outside of `0 .. E - 1`
    names no expert: its results are zeros.

    Bits are those of `linears_fn(numerics)` of that row and that expert's matrix. So with "pinned", and with weights in int8
    whatever `numerics` says, they do not depend on the number, the order, the contents or the experts of the other rows.

    The function raises `InputError` if arguments contradict each other, or the implementation does not support them.

    Args:
        numerics: names the products.
        used: bool `[R]` for `R` rows of ids, says whose results are used; None says that all are. The results of other rows may
            be anything finite.
    """

    def experts_f32(x: jax.Array, ids: jax.Array, *weights: Matrices) -> tuple[jax.Array, ...]:
        rounded, floats = rounded_or_floats(weights)
        _check(x, ids, weights)
        rows = x.reshape(-1, x.shape[-1]) if x.ndim == ids.ndim else x.reshape(-1, *x.shape[-2:])
        of_rows = ids.reshape(-1, ids.shape[-1])
        if rounded:
            found = operations(numerics).int8_experts_f32(rows, of_rows, rounded, used)
        elif numerics.linear == "xla" and numerics.implementation not in KERNELS_FOR_XLA:
            found = xla.experts_f32(rows, of_rows, floats)
        else:
            found = operations(numerics).experts_f32(rows, of_rows, floats, used)
        return tuple(y_f32.reshape(*ids.shape, y_f32.shape[-1]) for y_f32 in found)

    return experts_f32


def gated_experts_fn(numerics: Numerics, used: jax.Array | None = None) -> GatedExpertsFn:
    """As `linear.api.gated_fn`, with the matrices of experts that rows choose; `ids` and `used` as for `experts_fn`."""
    found = operations(numerics)

    def gated_rows(x: jax.Array, ids: jax.Array, gate: Matrices, up: Matrices, activation: str) -> jax.Array | None:
        rounded, floats = rounded_or_floats((gate, up))
        if found.gated_experts is None or rounded or numerics.linear == "xla" or activation not in IN_C:
            return None
        _check(x, ids, (gate, up))
        rows = found.gated_experts(x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1]), *floats, activation, used)
        return rows.reshape(*ids.shape, rows.shape[-1])

    return gated_rows


def _check(x: jax.Array, ids: jax.Array, weights: tuple[Matrices, ...]) -> None:
    if ids.ndim < 1 or ids.dtype != jnp.int32 or x.shape[:-1] not in (ids.shape[:-1], ids.shape):
        given = f"x {x.shape} and {ids.dtype} ids {ids.shape}"
        raise InputError(f"x must be [..., in] or [..., k, in] for int32 ids [..., k], got {given}")
    matrices = [weight.values if isinstance(weight, QTensor) else weight for weight in weights]
    for matrix in matrices:
        if matrix.ndim != 3 or matrix.shape[2] != x.shape[-1] or matrix.shape[0] != matrices[0].shape[0]:
            given = ", ".join(str(each.shape) for each in matrices)
            raise InputError(f"weights of experts must be [E, out, in] with one E for x [..., in], got {given} for x {x.shape}")
    for weight in weights:
        if isinstance(weight, QTensor):
            check_inputs(x.shape[-1])
        elif weight.dtype != x.dtype:
            raise InputError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
