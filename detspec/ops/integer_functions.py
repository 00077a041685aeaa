"""Functions of integer models by implementation: the integers are the same, whatever computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from detspec.integer.spec import Activations
from detspec.ops import integer, integer_choices, integer_pages
from detspec.ops.integer_pages import PageLayout
from detspec.schedule import Numerics


class IntegerFunctions(NamedTuple):
    """The functions that have kernels."""

    products: Callable[..., list[jax.Array]]  # (row [R, n], matrices [m, n], ...) -> fixed [R, m], ...
    normed: Callable[..., Activations]  # see `integer.normed`
    gated: Callable[..., Activations]  # see `integer.gated`; of 8 bits, `integer.spread`, too
    appended: Callable[..., Any]  # see `integer_pages.appended`
    attended: Callable[..., jax.Array]  # see `integer_pages.attended`
    gumbel: Callable[[jax.Array, jax.Array, int], jax.Array]  # see `integer_choices.gumbel`
    layout: PageLayout  # of pages


def integer_functions(numerics: Numerics, activation_bits: int = 15) -> IntegerFunctions:
    """Kernels where `numerics` names an implementation that has some, else XLA's operations."""
    layout = layout_for(numerics)
    if numerics.implementation == "cpu":
        from detspec.ops import integer_cpu as cpu

        return IntegerFunctions(
            products=partial(cpu.products, bits=activation_bits),
            normed=cpu.normed,
            gated=partial(cpu.gated, spread=activation_bits == 8),
            appended=cpu.appended,
            attended=cpu.attended,
            gumbel=cpu.gumbel,
            layout=layout,
        )
    products: Callable[..., list[jax.Array]] = integer.products
    gumbel: Callable[..., jax.Array] = integer_choices.gumbel
    if numerics.implementation == "pallas_tpu":
        from detspec.ops import integer_tpu

        gumbel = partial(integer_tpu.gumbel, interpret=numerics.interpret)
    if numerics.implementation == "pallas_gpu" and numerics.linear == "pinned":
        from detspec.ops import integer_gpu

        products = partial(integer_gpu.products, interpret=numerics.interpret)
    return IntegerFunctions(
        products=partial(products, bits=activation_bits),
        normed=integer.normed,
        gated=_gated_and_spread if activation_bits == 8 else integer.gated,
        appended=integer_pages.appended,
        attended=partial(integer_pages.attended, layout=layout),
        gumbel=gumbel,
        layout=layout,
    )


def _gated_and_spread(gate: jax.Array, up: jax.Array, activation: str = "silu") -> Activations:
    return integer.spread(integer.gated(gate, up, activation))


def layout_for(numerics: Numerics) -> PageLayout:
    """The layout of pages for an implementation."""
    return integer_pages.GPU if numerics.implementation == "pallas_gpu" else integer_pages.PLAIN
