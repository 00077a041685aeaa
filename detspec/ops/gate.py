"""Gates: activations, and what they let through."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from detspec.native.library import kernel

ACTIVATION_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
IN_C = ("silu", "gelu_tanh")  # as `native/base.c` numbers them

# (gate_f32 [..., F], up_f32 [..., F], activation=, dtype=) -> [..., F]
GateFn = Callable[..., jax.Array]


def gated(gate_f32: jax.Array, up_f32: jax.Array, *, activation: str, dtype: DTypeLike) -> jax.Array:
    """`activation(gate) * up` in `dtype`, for two arrays `[..., F]`."""
    return (ACTIVATION_FNS[activation](gate_f32) * up_f32).astype(dtype)


def cpu_gated(gate_f32: jax.Array, up_f32: jax.Array, *, activation: str, dtype: DTypeLike) -> jax.Array:
    """As `gated`, by a kernel in C with an exponential of its own; other activations than SiLU and GELU by tanh are XLA's."""
    if activation not in IN_C:
        return gated(gate_f32, up_f32, activation=activation, dtype=dtype)
    rows = [each.reshape(-1, each.shape[-1]) for each in (gate_f32, up_f32)]
    call = kernel("detspec_gate", dtype, jax.ShapeDtypeStruct(rows[0].shape, dtype))
    return call(*rows, **number_of(activation)).reshape(gate_f32.shape)


def with_derivative(gate: GateFn) -> GateFn:
    """`gate`, which may be a kernel, with the derivative of `gated`."""

    def differentiable(gate_f32: jax.Array, up_f32: jax.Array, **how: Any) -> jax.Array:
        @jax.custom_vjp
        def found(gate_f32: jax.Array, up_f32: jax.Array) -> jax.Array:
            return gate(gate_f32, up_f32, **how)

        def backward(given: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.vjp(partial(gated, **how), *given)[1](cotangent)

        found.defvjp(lambda *given: (gate(*given, **how), given), backward)
        return found(gate_f32, up_f32)

    return differentiable


def number_of(activation: str) -> dict[str, np.int32]:
    """Gives kernels the number of an activation of `IN_C`, as an argument by name."""
    return {"activation": np.int32(IN_C.index(activation))}
