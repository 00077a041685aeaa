"""Functions of integer models by implementation: the integers are the same, whatever computes them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from detspec.integer.spec import Activations, IntMatrix
from detspec.ops import integer, integer_choices, integer_pages
from detspec.schedule import Numerics


class IntegerFunctions(NamedTuple):
    """The functions that have kernels."""

    products: Callable[..., list[jax.Array]]  # (row [R, n], matrices [m, n], ...) -> fixed [R, m], ...
    normed: Callable[..., Activations]  # see `integer.normed`
    gated: Callable[[jax.Array, jax.Array], Activations]  # see `integer.gated`
    appended: Callable[..., Any]  # see `integer_pages.appended`
    attended: Callable[..., jax.Array]  # see `integer_pages.attended`
    gumbel: Callable[[jax.Array, jax.Array, int], jax.Array]  # see `integer_choices.gumbel`


def _products(row: Activations, *matrices: IntMatrix) -> list[jax.Array]:
    return [integer.product(row, matrix) for matrix in matrices]


def integer_functions(numerics: Numerics) -> IntegerFunctions:
    """Kernels in C where `numerics` names the CPU's, else XLA's."""
    if numerics.implementation != "cpu":
        pages = integer_pages.appended, integer_pages.attended
        return IntegerFunctions(_products, integer.normed, integer.gated, *pages, integer_choices.gumbel)
    from detspec.ops import integer_cpu

    pages = integer_cpu.appended, integer_cpu.attended
    return IntegerFunctions(integer_cpu.products, integer_cpu.normed, integer_cpu.gated, *pages, integer_cpu.gumbel)
