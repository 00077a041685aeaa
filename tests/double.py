"""A program of the model in float64, operation by operation, so that what is left of a difference is not rounding."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

# For programs that run once: compiled fast rather than well.
QUICK_COMPILATION = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

SCATTER_PARAMS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` as numpy arrays, with a float64 in place of every float32 of its program: of values, constants and dtypes.

    The program is traced in float32, as it runs otherwise, and then evaluated; whatever `fn` casts to float32 stays float64.
    """
    program, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    with jax.enable_x64(True):
        wide = partial(_evaluate, program.jaxpr, [_widen(const) for const in program.consts])
        leaves = [_widen(leaf) for leaf in jax.tree.leaves(args)]
        found = jax.jit(wide, compiler_options=QUICK_COMPILATION)(*leaves)
        assert not any(leaf.dtype == np.float32 for leaf in found)
        return jax.tree.unflatten(jax.tree.structure(result), [np.asarray(leaf) for leaf in found])


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inputs = [_widen(atom.val) if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
        params = {name: _widened_dtype(value) for name, value in equation.params.items()}
        match equation.primitive.name:
            case "jit":
                outputs = _evaluate(params["jaxpr"].jaxpr, [_widen(const) for const in params["jaxpr"].consts], *inputs)
            case "remat2":
                outputs = _evaluate(params["jaxpr"], [], *inputs)
            case "custom_jvp_call":  # in what is worked out once more
                called = params["call_jaxpr"]
                outputs = _evaluate(called.jaxpr, [_widen(const) for const in called.consts], *inputs)
            case "scan":
                outputs = _scan(params, inputs)
            case "reduce_precision":
                outputs = inputs  # of float32, to keep a product apart from a sum
            case "cond":
                branches = [
                    partial(_evaluate, one.jaxpr, [_widen(const) for const in one.consts]) for one in params["branches"]
                ]
                outputs = jax.lax.switch(inputs[0], branches, *inputs[1:])
            case "scatter-add":  # holds the program of its sum, in float32
                outputs = [jax.lax.scatter_add(*inputs, **{name: params[name] for name in SCATTER_PARAMS})]
            case _:
                outputs = equation.primitive.bind(*inputs, **params)
                outputs = outputs if equation.primitive.multiple_results else [outputs]
        known |= zip(equation.outvars, outputs, strict=True)
    return [_widen(atom.val) if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]


def _scan(params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """`jax.lax.scan` of the equation's program."""
    if "ft_in" in params:  # jax 0.12: constants, what is carried, and what is gone through
        num_consts, num_carried, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carried = params["num_consts"], params["num_carry"]
    step = partial(_evaluate, params["jaxpr"].jaxpr, [_widen(const) for const in params["jaxpr"].consts])

    def body(carried: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
        found = step(*inputs[:num_consts], *carried, *each)
        return found[:num_carried], found[num_carried:]

    first = num_consts + num_carried
    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carried, each = jax.lax.scan(body, list(inputs[num_consts:first]), list(inputs[first:]), **how)
    return [*carried, *each]


def _widen(value: Any) -> Any:
    value = np.asarray(value)
    return value.astype(np.float64) if value.dtype == np.float32 else value


def _widened_dtype(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return np.dtype(np.float64) if is_dtype and value == np.float32 else value
